"""Any rank of any world with shared experts in one process: unmodified AutoEP under torch's fake process group.

Run as a program it writes, as JSON, a verdict for every combination below; see `deepspeed_ranks`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed_ranks

# World size and ep -> ranks: with the first experts and the last, in the middle, and those that hold padding only.
WORLDS = {(64, 8): (0, 7, 29, 62, 63), (1000, 4): (0, 3, 502, 998, 999), (1024, 8): (0, 7, 500, 1023), (8, 8): (0, 7)}
ZERO: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "stage3": {"stage": 3, "stage3_param_persistence_threshold": 10},
    "stage3-sub-groups": {"stage": 3, "stage3_param_persistence_threshold": 10, "sub_group_size": 5},
    "stage1-sequences": {"stage": 1, "sp": 2},
    "stage3-sequences": {"stage": 3, "sp": 2},
}
EXPERTS, WIDTH, FFN = 8, 6, 7
_MLP = "model.layers.0.mlp."
# Name -> shape of the whole tensor, as AutoEP has it.
SHAPES: dict[str, tuple[int, ...]] = {
    "model.norm.weight": (97,),
    f"{_MLP}router.gate.weight": (EXPERTS, WIDTH),
    f"{_MLP}experts.w1": (EXPERTS, FFN, WIDTH),
    f"{_MLP}experts.w2": (EXPERTS, WIDTH, FFN),
    f"{_MLP}experts.w3": (EXPERTS, FFN, WIDTH),
}


def content(name: str) -> Any:
    """A value for each element of each whole parameter, exact in fp32; no two elements have the same."""
    import torch

    shape = SHAPES[name]
    return (torch.arange(torch.Size(shape).numel()) + 10_000 * (1 + list(SHAPES).index(name))).float().view(shape)


def make_model() -> Any:
    import torch

    model = torch.nn.Module()
    model.config = SimpleNamespace(num_local_experts=EXPERTS, num_experts_per_tok=2)
    model.model, layer, mlp, experts = (torch.nn.Module() for _ in range(4))
    model.model.norm, model.model.layers = torch.nn.RMSNorm(97), torch.nn.ModuleList([layer])
    layer.mlp, mlp.gate, mlp.experts = mlp, torch.nn.Linear(WIDTH, EXPERTS, bias=False), experts
    gate_up = torch.cat([content(f"{_MLP}experts.w1"), content(f"{_MLP}experts.w3")], dim=1)
    experts.gate_up_proj = torch.nn.Parameter(gate_up)
    experts.down_proj = torch.nn.Parameter(content(f"{_MLP}experts.w2"))
    with torch.no_grad():
        model.model.norm.weight.copy_(content("model.norm.weight"))
        mlp.gate.weight.copy_(content(f"{_MLP}router.gate.weight"))
    return model


def make_engine(zero: dict[str, Any], ep: int) -> Any:
    import deepspeed
    import torch

    from elastic.engines.deepspeed.experts.optimizer import Regrouped

    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=Regrouped(torch.optim.AdamW(model.parameters(), lr=0.01)),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
            "expert_parallel": {
                "enabled": True,
                "autoep_size": ep,
                "preset_model": "mixtral",
                "use_grouped_mm": False,
            },
        },
        dist_init_required=False,
    )
    return engine


def check_rank(zero: dict[str, Any], rank: int, world_size: int, ep: int) -> None:
    """What the state says of a rank, looked up in DeepSpeed's own flat tensors, is these very elements of the whole;
    and `open_state` has compared it with the pure layout."""
    import torch
    from deepspeed import comm

    from elastic.engines.deepspeed.adapter import DeepSpeedAdapter
    from elastic.engines.deepspeed.experts.placement import make_groups
    from elastic.training.state.engine_state import open_state

    # In a world of one cell of experts there is no other part of a sequence.
    sp = zero.get("sp", 1) if world_size > ep else 1
    deepspeed_ranks.join_fake(rank, world_size)
    comm.init_distributed(dist_init_required=False, verbose=False)
    make_groups(ep, sp)
    engine = make_engine({key: value for key, value in zero.items() if key != "sp"}, ep)
    stage3 = zero["stage"] == 3
    flats = (
        engine.optimizer.fp32_partitioned_groups_flat if stage3 else engine.optimizer.single_partition_of_fp32_groups
    )
    state = open_state(DeepSpeedAdapter(engine))
    chunks = [chunk for chunk in state.layout.chunks if chunk.name in SHAPES]
    assert state.parameters.keys() == {*SHAPES, f"{_MLP}tokens_per_expert"}
    assert {name: tuple(state.parameters[name]) for name in SHAPES} == SHAPES
    for chunk in chunks:
        flat = flats[int(chunk.buffer.removeprefix("sub" if stage3 else "group"))].detach()
        found = flat[chunk.offset : chunk.offset + chunk.numel]
        assert torch.equal(found, content(chunk.name).flatten()[chunk.start : chunk.stop]), chunk
    for name in (f"{_MLP}experts.w{number}" for number in (1, 2, 3)):
        share = torch.Size(SHAPES[name]).numel() // ep
        own = [chunk for chunk in chunks if chunk.name == name]
        first = rank // sp % ep * share
        assert all(first <= chunk.start < chunk.stop <= first + share for chunk in own), own
        assert world_size > ep or sum(chunk.numel for chunk in own) == share, own
    assert chunks or rank > 0
    deepspeed_ranks._leave(engine)


if __name__ == "__main__":
    deepspeed_ranks.report_meshes(check_rank, "ep", ZERO, WORLDS)
