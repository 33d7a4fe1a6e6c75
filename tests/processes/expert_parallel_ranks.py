"""Any rank of any world with shared experts in one process: unmodified AutoEP under torch's fake process group.

Run as a program it writes, as JSON, a verdict for every combination below; see `deepspeed_ranks`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed_ranks
import held_check

# World size and over how many ranks experts are spread
# -> ranks: with the first experts and the last, in the middle, and those that hold padding only.
WORLDS = {(64, 8): (0, 7, 29, 62, 63), (1000, 4): (0, 3, 502, 998, 999), (1024, 8): (0, 7, 500, 1023), (8, 8): (0, 7)}
ZERO: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2-round-robin": {"stage": 2, "round_robin_gradients": True},
    "stage3": {"stage": 3, "stage3_param_persistence_threshold": 10},
    "stage3-sub-groups": {"stage": 3, "stage3_param_persistence_threshold": 10, "sub_group_size": 5},
    "stage1-sequences": {"stage": 1, "sp": 2},
    "stage3-sequences": {"stage": 3, "sp": 2},
    "stage2-layers": {"stage": 2, "tp": 2},
    "stage3-layers": {"stage": 3, "tp": 2},
}
EXPERTS, WIDTH, FFN = 8, 6, 7
# Of those that there are, none is cut.
NO_LAYERS: dict[str, Any] = {"use_default_specs": False, "layer_specs": []}
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


def of_lane(name: str, rank: int, ep: int, tp: int) -> Any:
    """Of experts what the ranks with the same slices have: every `tp`th of the parts that single ranks have."""
    whole = content(name)
    if ".experts." not in name:
        return whole
    return whole.view(ep // tp, tp, -1, *whole.shape[1:])[:, rank % tp].flatten(0, 1)


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


def make_engine(zero: dict[str, Any], ep: int, tp: int) -> Any:
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
            **({"tensor_parallel": {"autotp_size": tp, "partition_config": NO_LAYERS}} if tp > 1 else {}),
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
    from elastic.engines.deepspeed.experts.placement import cut_of, make_groups
    from elastic.training.state.engine_state import open_state

    # In a world of one cell of experts there is no other part of a sequence.
    sp = zero.get("sp", 1) if world_size > ep else 1
    deepspeed_ranks.join_fake(rank, world_size)
    comm.init_distributed(dist_init_required=False, verbose=False)
    tp = zero.get("tp", 1)
    if tp == 1:
        make_groups(ep, sp)
    engine = make_engine({key: value for key, value in zero.items() if key not in ("sp", "tp")}, ep, tp)
    stage3 = zero["stage"] == 3
    flats = (
        engine.optimizer.fp32_partitioned_groups_flat if stage3 else engine.optimizer.single_partition_of_fp32_groups
    )
    state = open_state(DeepSpeedAdapter(engine))
    chunks = [chunk for chunk in state.layout.chunks if chunk.name in SHAPES]
    assert state.parameters.keys() == {*SHAPES, f"{_MLP}tokens_per_expert"}
    held = {name: of_lane(name, rank, ep, tp) for name in SHAPES}
    assert {name: tuple(state.parameters[name]) for name in SHAPES} == {name: each.shape for name, each in held.items()}
    for chunk in chunks:
        flat = flats[int(chunk.buffer.removeprefix("sub" if stage3 else "group"))].detach()
        found = flat[chunk.offset : chunk.offset + chunk.numel]
        assert torch.equal(found, held[chunk.name].flatten()[chunk.start : chunk.stop]), chunk
    for name in (f"{_MLP}experts.w{number}" for number in (1, 2, 3)):
        share = torch.Size(SHAPES[name]).numel() // ep
        said = cut_of(engine.module.get_parameter(name), tp).ranges[rank % tp]
        assert torch.equal(torch.cat([content(name)[start:stop] for start, stop in said]), held[name])
        own = [chunk for chunk in chunks if chunk.name == name]
        first = rank // (sp * tp) % (ep // tp) * share
        assert all(first <= chunk.start < chunk.stop <= first + share for chunk in own), own
        assert world_size > ep or sum(chunk.numel for chunk in own) == share, own
    assert chunks or rank > 0
    shapes = [
        (shape, {"group": 1, "experts": 1, "cut": 0 if tp > 1 else -1} if ".experts." in name else {"group": 0})
        for name, shape in SHAPES.items()
    ]
    mesh = {"ep": ep // tp, "tp": tp, "sp": sp}
    if tp > 1:
        state.sharded.cuts = {name: cut for name, p in engine.module.named_parameters() if (cut := cut_of(p, tp))}
    held_check.check(state.sharded, rank, world_size, mesh, held_check.tensors_of(zero, shapes))
    deepspeed_ranks._leave(engine)


if __name__ == "__main__":
    deepspeed_ranks.report_meshes(check_rank, "ep", ZERO, WORLDS)
