"""Any rank of any world with shared layers in one process: unmodified AutoTP under torch's fake process group.

Run as a program it writes, as JSON, a verdict for every combination below; see `deepspeed_ranks`.
"""

from __future__ import annotations

from typing import Any

import deepspeed_ranks
import held_check

# World size and tp -> ranks: the first cell's, one in the middle, the last, and those that hold padding only.
WORLDS = {(64, 8): (0, 7, 29, 62, 63), (1000, 5): (0, 4, 501, 998, 999), (1000, 8): (0, 7, 500, 999)}
ZERO: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "stage3": {"stage": 3, "stage3_param_persistence_threshold": 10},
}
# Name -> shape of the whole tensor and the dimension that is sliced; 83 and 97 can be shared evenly by nobody.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "block.q_proj.weight": ((97, 24), 0),
    "block.q_proj.bias": ((97,), 0),
    "block.o_proj.weight": ((24, 83), 1),
    "block.o_proj.bias": ((24,), None),
    "block.norm.weight": ((24,), None),
}
LAYERS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*q_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*o_proj\.weight$"], "partition_type": "row"},
    ],
}


def content(name: str) -> Any:
    """A value for each element of each whole parameter, exact in fp32; no two elements have the same."""
    import torch

    shape, _ = SHAPES[name]
    return (torch.arange(torch.Size(shape).numel()) + 10_000 * (1 + list(SHAPES).index(name))).float().view(shape)


def slices(tp: int, lane: int) -> dict[str, Any]:
    """What a lane holds: nearly even shares, the larger ones first (deepspeed/module_inject/tp_shard.py:88)."""
    found = {}
    for name, (shape, dim) in SHAPES.items():
        whole = content(name)
        if dim is not None:
            sizes = [shape[dim] // tp + (number < shape[dim] % tp) for number in range(tp)]
            whole = whole.split(sizes, dim)[lane].contiguous()
        found[name] = whole
    return found


def make_engine(zero: dict[str, Any], tp: int) -> Any:
    import deepspeed
    import torch

    model = torch.nn.Module()
    model.block = torch.nn.Module()
    model.block.q_proj, model.block.o_proj = torch.nn.Linear(24, 97), torch.nn.Linear(83, 24)
    model.block.norm = torch.nn.RMSNorm(24)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(content(name))
    named = dict(model.named_parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW([named[name] for name in SHAPES], lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
            "tensor_parallel": {"autotp_size": tp, "partition_config": LAYERS},
        },
        dist_init_required=False,
    )
    return engine


def check_rank(zero: dict[str, Any], rank: int, world_size: int, tp: int) -> None:
    """The pure layout of a lane's slices, looked up in DeepSpeed's own flat tensors, holds these very elements."""
    import torch

    from elastic.core.mesh import Mesh
    from elastic.core.sharding.zero import zero3_layout, zero12_layout
    from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
    from elastic.engines.deepspeed.layers.cuts import noting_cuts
    from elastic.training.state.engine_state import open_state

    mesh = Mesh.of(world_size, tp=tp)
    deepspeed_ranks.join_fake(rank, world_size)
    with noting_cuts(tp) as cuts:
        engine = make_engine(zero, tp)
    own = slices(tp, mesh.tensor(rank))
    group = [(name, value.numel()) for name, value in own.items()]
    if zero["stage"] == 3:
        layout = zero3_layout([group], mesh.dp).ranks[mesh.data(rank)]
        flats = engine.optimizer.fp32_partitioned_groups_flat
    else:
        round_robin = zero.get("round_robin_gradients", False)
        layout = zero12_layout([group], mesh.dp, round_robin=round_robin).ranks[mesh.data(rank)]
        flats = engine.optimizer.single_partition_of_fp32_groups
    assert [flat.numel() for flat in flats] == list(layout.buffers.values())
    for chunk in layout.chunks:
        flat = flats[list(layout.buffers).index(chunk.buffer)].detach()
        found = flat[chunk.offset : chunk.offset + chunk.numel]
        assert torch.equal(found, own[chunk.name].flatten()[chunk.start : chunk.stop]), chunk
    state = open_state(DeepSpeedAdapter(engine), mesh)
    assert set(layout.chunks) <= set(state.layout.chunks)
    record, _ = state.record(1)
    assert (record.rank, record.world_size, record.tp) == (rank, world_size, tp)
    expected = {name: tuple(value.shape) for name, value in own.items()}
    shapes = [(shape, {"cut": -1 if dim is None else dim, "group": 0}) for shape, dim in SHAPES.values()]
    state.sharded.cuts = cuts
    held_check.check(state.sharded, rank, world_size, {"tp": tp}, held_check.tensors_of(zero, shapes))
    assert (dict(record.parameters) if record.parameters else None) == (expected if rank < tp else None)
    deepspeed_ranks._leave(engine)


if __name__ == "__main__":
    deepspeed_ranks.report_meshes(check_rank, "tp", ZERO, WORLDS)
