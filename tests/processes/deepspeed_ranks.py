"""Any rank of any world size in one process: unmodified DeepSpeed under torch's fake process group.

Run as a program it writes, as JSON, a verdict for every combination below. The fake group is private to torch: it is
imported here and nowhere else. Its collectives do nothing: weights are what this rank's model had, layouts are exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import held_check

# Of every stage's ranks: the first, the middle, the last, and those near the end that hold padding only.
WORLDS = {64: (0, 1, 31, 62, 63), 1000: (0, 499, 500, 998, 999)}

# Numels below, at and above the world sizes, prime and even; in groups as the optimizer gets them.
GROUPS = (
    (("layers.10.weight", 4099), ("layers.2.weight", 64), ("embedding", 130), ("one", 1), ("last", 7)),
    (("three", 3), ("seven", 7), ("bias", 999), ("scale", 1)),
    (("alone", 1),),
)
FROZEN = ("frozen", 1001)

ZERO: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage1-round-robin": {"stage": 1, "round_robin_gradients": True},
    "stage2-aligned": {"stage": 2, "parameter_alignment": True},
    "stage2-aligned-round-robin": {"stage": 2, "parameter_alignment": True, "round_robin_gradients": True},
    "stage3": {"stage": 3},
    "stage3-sub-groups": {"stage": 3, "sub_group_size": 4, "stage3_param_persistence_threshold": 10},
}


def join_fake(rank: int, world_size: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def content(name: str, numel: int) -> Any:
    """A value for each element of each parameter, exact in fp32; no two elements have the same."""
    import torch

    names = sorted([name for group in GROUPS for name, _ in group] + [FROZEN[0]])
    return (torch.arange(numel) + 10_000 * (1 + names.index(name))).float()


def make_model() -> Any:
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, numel in (*(tensor for group in GROUPS for tensor in group), FROZEN):
                parameter = torch.nn.Parameter(content(name, numel), requires_grad=name != FROZEN[0])
                self.register_parameter(name.replace(".", "_"), parameter)

        def forward(self) -> torch.Tensor:
            return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()

    return Flat()


def make_engine(zero: dict[str, Any]) -> Any:
    import deepspeed
    import torch

    model = make_model()
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name.replace(".", "_")] for name, _ in group]} for group in GROUPS]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01), config=config, dist_init_required=False
    )
    return engine


def open_state(engine: Any) -> Any:
    """The state of a bare DeepSpeedEngine, as a generation opens it."""
    from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
    from elastic.training.state import engine_state

    return engine_state.open_state(DeepSpeedAdapter(engine))


def check_rank(zero: dict[str, Any], rank: int, world_size: int) -> None:
    """The pure layout's chunks, looked up in DeepSpeed's own flat tensors, hold these very elements."""
    import torch

    from elastic.core.sharding.zero import zero3_layout, zero12_layout

    join_fake(rank, world_size)
    engine = make_engine(zero)
    groups = [[(name.replace(".", "_"), numel) for name, numel in group] for group in GROUPS]
    if zero["stage"] == 3:
        layout = zero3_layout(groups, world_size, zero.get("sub_group_size", 10**9)).ranks[rank]
        flats = engine.optimizer.fp32_partitioned_groups_flat
    else:
        layout = zero12_layout(
            groups,
            world_size,
            round_robin=zero.get("round_robin_gradients", False),
            parameter_alignment_elements=4 if zero.get("parameter_alignment") else 1,
        ).ranks[rank]
        flats = engine.optimizer.single_partition_of_fp32_groups
    numels = {name.replace(".", "_"): (name, numel) for group in GROUPS for name, numel in group}
    assert [flat.numel() for flat in flats] == list(layout.buffers.values())
    for chunk in layout.chunks:
        flat = flats[list(layout.buffers).index(chunk.buffer)].detach()
        found = flat[chunk.offset : chunk.offset + chunk.numel]
        assert torch.equal(found, content(*numels[chunk.name])[chunk.start : chunk.stop]), chunk
    # And what we derive from the live engine agrees with the pure layout (open_state compares them).
    state = open_state(engine)
    shapes = [((numel,), {"group": number}) for number, group in enumerate(GROUPS) for _, numel in group]
    tensors = [*held_check.tensors_of(zero, shapes), *held_check.frozen(zero, (FROZEN[1],))]
    held_check.check(state.sharded, rank, world_size, {}, tensors)
    assert set(layout.chunks) <= set(state.layout.chunks)
    snapshot = state.snapshot(run_id="run", generation=1, step=0, caller={})
    assert (snapshot.extra_state is not None) == (rank == 0)
    _leave(engine)


def _leave(engine: Any) -> None:
    from deepspeed import comm

    from elastic.engines.deepspeed.teardown import release_engine

    release_engine(engine)
    comm.destroy_process_group()


def check_fake_group() -> None:
    """Joins at once, alone, as any rank; collectives return and change nothing."""
    import torch
    import torch.distributed as dist

    join_fake(2, 5)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (dist.get_rank(), dist.get_world_size(), ones.tolist()) == (2, 5, [1.0, 1.0, 1.0])
    dist.destroy_process_group()


def verdict_of(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except Exception:  # noqa: BLE001 - the traceback is the verdict
        return traceback.format_exc()
    return ""


def verdicts_of(program: str, folder: Path, *more: str) -> dict[str, str]:
    """What such a program writes, run in a process of its own: the fake group, DeepSpeed's globals and the environment
    stay there."""
    here, report = Path(__file__).parent, folder / "verdicts.json"
    done = subprocess.run(
        [sys.executable, str(here / program), str(report), *more],
        env=os.environ | {"PYTHONPATH": str(here.parent.parent)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(report.read_text())
    return found


def begin() -> None:
    """A program's process is to import DeepSpeed."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def report_meshes(
    check: Callable[..., None], axis: str, zeros: Mapping[str, Any], worlds: Mapping[tuple[int, int], Sequence[int]]
) -> None:
    """The main function of a program: `check` of (ZeRO's options, rank, world size, size of the axis)."""
    begin()
    verdicts = {
        f"{name}-{rank}-of-{world_size}-{axis}{size}": verdict_of(check, zero, rank, world_size, size)
        for name, zero in zeros.items()
        for (world_size, size), ranks in worlds.items()
        for rank in ranks
    }
    Path(sys.argv[1]).write_text(json.dumps(verdicts))


def main() -> None:
    begin()
    verdicts = {"canary": verdict_of(check_fake_group)}
    for name, zero in ZERO.items():
        for world_size, ranks in WORLDS.items():
            for rank in ranks:
                verdicts[f"{name}-{rank}-of-{world_size}"] = verdict_of(check_rank, zero, rank, world_size)
    with open(sys.argv[1], "w") as report:
        json.dump(verdicts, report)


if __name__ == "__main__":
    main()
