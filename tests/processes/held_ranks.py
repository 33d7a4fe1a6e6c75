"""What a rank tells of the training state that it holds, against what unmodified DeepSpeed has allocated after two
steps, at world sizes of no test machine: in bf16, fp16 and fp32, with gradients added up in either, and with offload.

Run as a program it writes, as JSON, a verdict for every combination below (see `deepspeed_ranks`). What is allocated is
found by following the engine's own attributes, each storage once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed_ranks
from deepspeed_ranks import FROZEN, GROUPS

MICRO_BATCHES = 2
PERSISTENCE_THRESHOLD = 1002
# Every combination: ZeRO's options are added to its stage.
BF16, FP32_SUMS = {"bf16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 0}}
# Masters in half precision; with the optimizer's states in fp32 DeepSpeed wants its CPUAdam.
BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
ALL_BF16 = {"bf16": {**BF16_MASTERS["bf16"], "bf16_optimizer_states": True}}
FP16_MASTERS = {"fp16": {**FP16["fp16"], "fp16_master_weights_and_grads": True}}
OPTIMIZER, PARAMETERS = {"offload_optimizer": {"device": "cpu"}}, {"offload_param": {"device": "cpu"}}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    **{f"fp32-{stage}": (stage, {}, {}, "AdamW") for stage in range(4)},
    **{
        f"fp32-bf16-sums-{stage}": (stage, {"data_types": {"grad_accum_dtype": "bf16"}}, {}, "SGD")
        for stage in (1, 2, 3)
    },
    **{f"bf16-{stage}": (stage, BF16, {}, "AdamW") for stage in range(4)},
    **{f"bf16-fp32-sums-{stage}": (stage, BF16 | FP32_SUMS, {}, "SGD") for stage in (1, 2, 3)},
    **{f"bf16-masters-{stage}": (stage, ALL_BF16, {}, "AdamW") for stage in (1, 2, 3)},
    "bf16-immediate-1": (1, {"bf16": {"enabled": True, "immediate_grad_update": True}} | FP32_SUMS, {}, "AdamW"),
    **{f"fp16-{stage}": (stage, FP16, {}, "SGD") for stage in range(4)},
    **{f"fp16-fp32-sums-{stage}": (stage, FP16 | FP32_SUMS, {}, "AdamW") for stage in (1, 2, 3)},
    **{f"offload-fp32-{stage}": (stage, {}, OPTIMIZER, "SGD") for stage in (1, 2, 3)},
    **{f"offload-bf16-{stage}": (stage, BF16, OPTIMIZER, "AdamW") for stage in (1, 2, 3)},
    **{f"offload-bf16-fp32-sums-{stage}": (stage, BF16 | FP32_SUMS, OPTIMIZER, "AdamW") for stage in (1, 2, 3)},
    "offload-parameters-3": (3, BF16, OPTIMIZER | PARAMETERS, "AdamW"),
    "offload-parameters-alone-3": (3, BF16 | FP32_SUMS, PARAMETERS, "SGD"),
}
# DeepSpeed's CPUAdam is compiled where no cache has it.
COMPILED: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    **{f"offload-bf16-masters-{stage}": (stage, BF16_MASTERS, OPTIMIZER, "CPUAdam") for stage in (1, 2, 3)},
    **{f"offload-fp16-masters-{stage}": (stage, FP16_MASTERS, OPTIMIZER, "CPUAdam") for stage in (1, 2, 3)},
}
EVERY = {**CASES, **COMPILED}
# With stage 3 only rank 0 trains here: the others compare their order of modules with what it never sends.
WORLDS = {1: (0,), 3: (0, 1, 2), 64: (0, 31, 63)}


def make_engine(case: str) -> Any:
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    class Flat(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.stack([parameter.float().sum() for parameter in self.parameters()]).sum() / 1000

    stage, more, zero, optimizer = EVERY[case]
    model = Flat()
    for name, numel in (*(tensor for group in GROUPS for tensor in group), FROZEN):
        trained = name != FROZEN[0]
        model.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.ones(numel), requires_grad=trained))
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name.replace(".", "_")] for name, _ in group]} for group in GROUPS]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 5000,
            "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
            **zero,
        },
        **more,
    }
    base: Any = {
        "AdamW": lambda: torch.optim.AdamW(groups, lr=0.01),
        "SGD": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "CPUAdam": lambda: DeepSpeedCPUAdam(groups, lr=0.01),
    }[optimizer]()
    engine, *_ = deepspeed.initialize(model=model, optimizer=base, config=config, dist_init_required=False)
    return engine


# --- what DeepSpeed has allocated ---

# Room of a fixed size, whatever the world, and single numbers.
_NO_STATE = (
    "ipg_buckets",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_buffer_for_gpu_offload",
    "inf_or_nan_tracker",
)


def allocated(engine: Any) -> dict[int, Any]:
    """Storages by their addresses: of the module's parameters, of all tensors that the optimizer's attributes lead to,
    and of what hangs on any of them as a gradient or a part."""
    wrapper = engine.optimizer
    roots = [list(engine.module.parameters()), dict(wrapper.state), wrapper.param_groups]
    roots += [value for name, value in vars(wrapper).items() if name not in _NO_STATE]
    found: dict[int, Any] = {}
    for tensor in _tensors(roots, {}):
        storage = tensor.untyped_storage()
        if tensor.dim() and not tensor.is_meta and storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


def _tensors(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    import torch

    if id(value) in seen:
        return
    # Kept: else another object would get its id.
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield value
        hanging = [getattr(value, name, None) for name in ("grad_accum", "ds_tensor")]
        for other in [*hanging, value.grad if value.is_leaf else None]:
            if other is not None:
                yield from _tensors(other, seen)
    elif isinstance(value, Mapping):
        yield from _tensors([*value.keys(), *value.values()], seen)
    elif isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _tensors(each, seen)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors([value.param_groups, dict(value.state)], seen)


def train(engine: Any, stage: int) -> int:
    """Bytes, in the second of two steps: stages 0 and 1 once a micro-batch has been added up and none reduced, stages
    2 and 3 when all have been."""
    sizes = []
    for _ in range(2 * MICRO_BATCHES):
        engine.backward(engine())
        sizes.append(sum(storage.nbytes() for storage in allocated(engine).values()))
        engine.step()
    return sizes[2 if stage < 2 else 3]


def not_told(case: str, engine: Any, rank: int, world_size: int) -> int:
    """Bytes that no element accounts for: of whole flats and of the sums of their gradients the ends, of partitions
    that stage 2 adds up as whole tensors the padding, and of parameters that stage 3 has gathered that of their parts.

    Negative where bytes are reported that have no memory of their own: what one rank alone has gathered is its part,
    and with offload no sums are kept of a partition that is padding.
    """
    (stage, _, zero, _), wrapper = EVERY[case], engine.optimizer
    weight = next(engine.module.parameters()).element_size()
    totals = [sum(numel for _, numel in group) for group in GROUPS]
    if stage == 3:
        small = [numel for group in (*GROUPS, (FROZEN,)) for _, numel in group if numel <= PERSISTENCE_THRESHOLD]
        return weight * (sum(-numel % world_size for numel in small) if world_size > 1 else -sum(small))
    ends = sum(-total % (2 * world_size) for total in totals) if stage else 0
    if hasattr(wrapper, "fp32_groups_gradients_flat"):
        return ends * (weight + wrapper.grad_acc_dtype.itemsize)
    if stage < 2:
        return ends * weight
    sums = wrapper.gradient_accumulation_dtype.itemsize
    parts = [-(-total // (2 * world_size)) * 2 for total in totals]
    own = [min(max(total - rank * part, 0), part) for total, part in zip(totals, parts, strict=True)]
    if "-fp32-sums-" in case:
        absent = sum(part for part, numel in zip(parts, own, strict=True) if not numel) if zero else 0
        return ends * weight - sums * absent
    return ends * weight + (0 if zero else sums * (sum(parts) - sum(own)))


def on_host(case: str, engine: Any) -> int:
    """Bytes of what DeepSpeed puts there with offload, by its own names."""
    import torch

    (stage, _, zero, _), wrapper = EVERY[case], engine.optimizer
    tensors: list[Any] = []
    if "offload_param" in zero:
        tensors += [parameter.ds_tensor for parameter in engine.module.parameters()]
    if "offload_optimizer" in zero:
        masters = wrapper.fp32_partitioned_groups_flat if stage == 3 else wrapper.single_partition_of_fp32_groups
        tensors += [*masters, *(master.grad for master in masters)]
        kept = [value for state in wrapper.optimizer.state.values() for value in state.values()]
        # CPUAdam counts its steps in a number.
        tensors += [value for value in kept if isinstance(value, torch.Tensor) and value.dim()]
        if stage == 3:
            tensors.append(wrapper.grad_partitions_flat_buffer)
        else:
            tensors += wrapper.param_buffer_of_bit16_for_cpu_offload_groups
            tensors += wrapper.accumulated_grads_in_cpu.values()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def to_device(case: str, engine: Any) -> None:
    """Torch's meta device is that of this engine from now on: what is not offloaded lies there."""
    import torch

    (stage, _, zero, _), wrapper = EVERY[case], engine.optimizer
    groups = [*wrapper.fp16_groups] if stage == 3 else [*wrapper.bit16_groups, *wrapper.round_robin_bit16_groups]
    for name, parameter in list(engine.module.named_parameters()):
        moved = torch.nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
        vars(moved).update(vars(parameter))
        if stage == 3 and "offload_param" not in zero:
            moved.ds_tensor = parameter.ds_tensor.to("meta")
        engine.module.register_parameter(name, moved)
        for group in groups:
            group[:] = [moved if each is parameter else each for each in group]
    if stage == 3 and "offload_optimizer" not in zero:
        wrapper.grad_partitions_flat_buffer = wrapper.grad_partitions_flat_buffer.to("meta")
        for number, master in enumerate(wrapper.fp32_partitioned_groups_flat):
            moved = wrapper.fp32_partitioned_groups_flat[number] = master.detach().to("meta")
            kept = wrapper.optimizer.state.pop(master)
            wrapper.optimizer.state[moved] = {key: tensor.to("meta") for key, tensor in kept.items()}


# --- what ranks report ---

# By case, of the first world's first rank.
_told: dict[str, Any] = {}


def check_rank(case: str, engine: Any, rank: int, world_size: int) -> None:
    """What this rank tells of itself is what it has; and what is computed of the fullest rank, from what the first one
    of another world tells, is no less, and no more than two ends of tensors above it in stage 2."""
    import torch

    from elastic.core.mesh import MeshSettings
    from elastic.core.sharding.mesh_memory import state_bytes
    from elastic.engines.deepspeed.state.open import zero_state
    from elastic.training.watch.held_state import held_state

    stage, *_ = EVERY[case]
    real = train(engine, stage) - not_told(case, engine, rank, world_size)
    held, own = held_state(deepspeed_ranks.open_state(engine).sharded, torch.device("cpu"), 1)
    assert own == real, (own, real)
    computed = state_bytes(_told.setdefault(case, held), MeshSettings(), world_size)
    reached = max(tensors.reached_bytes for tensors in held.tensors)
    ends = sum(sum(sorted(numel for _, numel in group)[-2:]) for group in GROUPS)
    assert real <= computed, (real, computed)
    assert rank > 0 or computed <= real + reached * ends, (real, computed)
    if case.startswith("offload"):
        host = on_host(case, engine)
        to_device(case, engine)
        found = [held_state(zero_state(engine), torch.device(name), 1)[1] for name in ("cpu", "meta")]
        assert found == [host, real - host], (found, host, real)


def judge(case: str, rank: int, world_size: int) -> None:
    deepspeed_ranks.join_fake(rank, world_size)
    engine = make_engine(case)
    try:
        check_rank(case, engine, rank, world_size)
    finally:
        deepspeed_ranks._leave(engine)


def train_and_tell(config: dict[str, Any]) -> None:
    """A training function of a crew's process, for DeepSpeed: bytes that are there after the last backward pass, told
    of this rank, and computed of the fullest."""
    import crew
    import torch
    import trainings

    import elastic
    from elastic.core.mesh import MeshSettings
    from elastic.core.sharding.mesh_memory import state_bytes
    from elastic.engines.deepspeed.state.open import zero_state
    from elastic.training.watch.held_state import held_state

    engine, loader = trainings.build(config)
    native = engine.deepspeed
    for _ in elastic.epochs():
        for x, y in loader:
            engine.backward(torch.nn.functional.mse_loss(engine(x).float(), y.float()))
            real = sum(storage.nbytes() for storage in allocated(native).values())
            engine.step()
    held, own = held_state(zero_state(native), torch.device("cpu"), 1)
    crew.told.update(real=real, own=own, computed=state_bytes(held, MeshSettings(), elastic.get_context().world_size))


def main() -> None:
    deepspeed_ranks.begin()
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed believes that a CPU cannot compute in fp16; torch can.
    get_accelerator().is_fp16_supported = lambda: True
    verdicts = {}
    for case, (stage, *_) in (COMPILED if "compiled" in sys.argv else CASES).items():
        for world_size, ranks in WORLDS.items():
            for rank in ranks if stage < 3 else ranks[:1]:
                verdict = deepspeed_ranks.verdict_of(judge, case, rank, world_size)
                verdicts[f"{case}-{rank}-of-{world_size}"] = verdict
    Path(sys.argv[1]).write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main()
