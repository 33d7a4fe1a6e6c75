"""Any rank of any world with shared experts in one process: unmodified layers of deepspeed.moe under torch's fake
process group.

Run as a program it writes, as JSON, a verdict for every combination below; see `deepspeed_ranks`.
"""

from __future__ import annotations

from typing import Any

import deepspeed_ranks
import held_check
from expert_parallel_ranks import WORLDS

ZERO: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2-round-robin": {"stage": 2, "round_robin_gradients": True},
}
EXPERTS, WIDTH = 8, 6
_LIST = "moe.deepspeed_moe.experts.deepspeed_experts"
# Name among all experts -> shape.
SHAPES: dict[str, tuple[int, ...]] = {
    "norm.weight": (97,),
    "moe.deepspeed_moe.gate.wg.weight": (EXPERTS, WIDTH),
    **{f"{_LIST}.{number}.weight": (7, WIDTH) for number in range(EXPERTS)},
    **{f"{_LIST}.{number}.bias": (7,) for number in range(EXPERTS)},
}


def content(name: str) -> Any:
    """A value for each element of each whole parameter, exact in fp32; no two elements have the same."""
    import torch

    shape = SHAPES[name]
    return (torch.arange(torch.Size(shape).numel()) + 10_000 * (1 + list(SHAPES).index(name))).float().view(shape)


def make_engine(zero: dict[str, Any], rank: int, ep: int) -> Any:
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = torch.nn.Module()
    model.norm = torch.nn.RMSNorm(97)
    model.moe = MoE(WIDTH, torch.nn.Linear(WIDTH, 7), num_experts=EXPERTS, ep_size=ep)
    own = EXPERTS // ep
    for name, parameter in model.named_parameters():
        before, found, after = name.partition(f"{_LIST}.")
        number, _, rest = after.partition(".")
        parameter.data = content(f"{before}{found}{rank % ep * own + int(number)}.{rest}" if found else name)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        },
        dist_init_required=False,
    )
    return engine


def check_rank(zero: dict[str, Any], rank: int, world_size: int, ep: int) -> None:
    """What the state says of a rank, looked up in DeepSpeed's own flat tensors, is these very elements of the expert
    with this number among all; and `open_state` has compared it with the pure layout."""
    import torch

    from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
    from elastic.engines.deepspeed.experts.native_passes import prepare
    from elastic.training.state.engine_state import open_state

    deepspeed_ranks.join_fake(rank, world_size)
    engine = make_engine(zero, rank, ep)
    prepare(engine, shared=True)
    state = open_state(DeepSpeedAdapter(engine))
    assert {name: tuple(shape) for name, shape in state.parameters.items()} == SHAPES
    assert sorted(name for group in state.sharded.groups() for name in group) == sorted(SHAPES)
    flats = engine.optimizer.single_partition_of_fp32_groups
    chunks = state.layout.chunks
    for chunk in chunks:
        flat = flats[int(chunk.buffer.removeprefix("group"))].detach()
        found = flat[chunk.offset : chunk.offset + chunk.numel]
        assert torch.equal(found, content(chunk.name).flatten()[chunk.start : chunk.stop]), chunk
    own = {f"{_LIST}.{rank % ep * EXPERTS // ep + at}." for at in range(EXPERTS // ep)}
    shapes = [
        (shape, {"group": 1, "experts": 2} if name.startswith(_LIST) else {"group": 0})
        for name, shape in SHAPES.items()
    ]
    held_check.check(state.sharded, rank, world_size, {"ep": ep}, held_check.tensors_of(zero, shapes))
    held = {chunk.name for chunk in chunks if chunk.name.startswith(_LIST)}
    assert all(name.startswith(tuple(own)) for name in held), held
    # What replicas are compared by: all names on all ranks, and of the same sizes in the same order.
    sizes = [weight.tensor.numel() for weight in state.sharded.weights()]
    assert {weight.name for weight in state.sharded.weights()} == set(SHAPES)
    assert sizes == sorted(sizes, key=lambda numel: numel == 0)
    deepspeed_ranks._leave(engine)


if __name__ == "__main__":
    deepspeed_ranks.report_meshes(check_rank, "ep", ZERO, WORLDS)
