"""Any rank of any world with stages in one process: unmodified PipelineModule under torch's fake process group.

Run as a program it writes, as JSON, a verdict for every combination below; see `deepspeed_ranks`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import deepspeed_ranks

# World size and pp -> ranks: of the first stage, the last, one between, of the first pipeline, the last, one between.
WORLDS = {(4, 4): (0, 3), (64, 4): (0, 3, 29, 62, 63), (1000, 5): (4, 502, 995), (1024, 8): (0, 7, 500, 1023)}
METHODS = {"parameters": "parameters", "uniform": "uniform", "type": "type:Linear"}
# Rows of each layer; the first and the last are one tied tensor.
ROWS = (31, 40, 3, 17, 29, 8, 11, 23, 5, 31)
WIDTH = 7


def content(layer: int) -> Any:
    """A value for each element of each layer, exact in fp32; no two elements have the same."""
    import torch

    return (torch.arange(ROWS[layer] * WIDTH) + 10_000 * (layer + 1)).float().view(ROWS[layer], WIDTH)


def name_of(layer: int) -> str:
    return "tied_modules.ends.weight" if layer in (0, len(ROWS) - 1) else f"{layer}.weight"


def make_engine(method: str, rank: int, world_size: int, pp: int) -> Any:
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    from elastic.core.mesh import Mesh
    from elastic.engines.deepspeed.pipeline.placed import placed

    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    between = [LayerSpec(torch.nn.Linear, WIDTH, rows, bias=False) for rows in ROWS[1:-1]]
    ends = [TiedLayerSpec("ends", torch.nn.Embedding, ROWS[0], WIDTH) for _ in range(2)]
    model = PipelineModule.__new__(PipelineModule)
    given = {"layers": [ends[0], *between, ends[1]], "loss_fn": print, "partition_method": method}
    placed(PipelineModule.__init__, model, (), given, Mesh.of(world_size, pp=pp))
    with torch.no_grad():
        for layer in range(model._local_start, model._local_stop):
            owner, _, _ = name_of(layer).rpartition(".")
            model.get_submodule(owner).weight.copy_(content(0 if name_of(layer) == name_of(0) else layer))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
        },
        dist_init_required=False,
    )
    return engine


def check_rank(method: str, rank: int, world_size: int, pp: int) -> None:
    """What the state says of a rank, looked up in DeepSpeed's own flat tensors, is these very elements of the whole;
    `open_state` has compared it with the pure layout, and the mesh names the rank's place as DeepSpeed does."""
    import torch

    from elastic.core.mesh import Mesh
    from elastic.core.sharding.layout import without
    from elastic.engines.deepspeed.state.open import open_zero_state

    deepspeed_ranks.join_fake(rank, world_size)
    engine = make_engine(METHODS[method], rank, world_size, pp)
    mesh = Mesh.of(world_size, pp=pp)
    assert (engine.stage_id, engine.grid.get_data_parallel_rank()) == (mesh.stage(rank), mesh.data(rank))
    assert engine.grid.pp_group == list(mesh.cell(rank))
    state = open_zero_state(engine)
    parts = engine.module.parts
    own = range(parts[mesh.stage(rank)], parts[mesh.stage(rank) + 1])
    assert {spec.name: spec.shape for spec in state.specs()} == {name_of(n): (ROWS[n], WIDTH) for n in own}
    assert state.tied == ((name_of(0),) if pp > 1 else ())
    assert state.elsewhere == ({name_of(0)} if len(ROWS) - 1 in own and 0 not in own else set())
    layers = {name_of(layer): layer for layer in reversed(range(len(ROWS)))}
    for master in state.masters():
        for chunk in master.chunks:
            found = master.tensor.detach()[chunk.offset : chunk.offset + chunk.numel]
            assert torch.equal(found, content(layers[chunk.name]).flatten()[chunk.start : chunk.stop]), chunk
    expected = state.expected()
    assert expected is not None
    assert not {chunk.name for chunk in without(expected, state.elsewhere).chunks} & state.elsewhere
    check_held(state, method, rank, mesh, parts)
    model = engine.module
    engine.destroy()
    check_placed_again(model)
    torch.distributed.destroy_process_group()


def check_placed_again(model: Any) -> None:
    """In other places the model has the layers that DeepSpeed gives them: the same objects where it has had them
    before, and what it has not takes no memory."""
    import torch

    from elastic.core.mesh import Mesh
    from elastic.engines.deepspeed.pipeline.placed import is_released, place_again, release
    from elastic.engines.model.placeholders import is_placeholder

    def layers() -> dict[str, Any]:
        return {name_of(n): model.get_parameter(name_of(n)) for n in range(model._local_start, model._local_stop)}

    known, hook = layers(), lambda *_: None
    model.register_forward_hook(hook)
    model.of_the_script = 1
    model.eval()
    for rank, world_size, pp in ((1, 2, 2), (0, 3, 3), (2, 6, 3), (0, 1, 1), (0, 2, 2)):
        release(model)
        assert is_released(model)
        torch.distributed.destroy_process_group()
        deepspeed_ranks.join_fake(rank, world_size)
        torch.manual_seed(rank)
        drawn = torch.initial_seed(), torch.get_rng_state().tolist()
        place_again(model, Mesh.of(world_size, pp=pp))
        assert not is_released(model)
        assert (torch.initial_seed(), torch.get_rng_state().tolist()) == drawn
        own = range(*model.parts[Mesh.of(world_size, pp=pp).stage(rank) :][:2])
        here = layers()
        assert set(here) == {name_of(n) for n in own}
        assert {name for name, _ in model.named_parameters()} == set(here)
        assert all(known.setdefault(name, layer) is layer for name, layer in here.items())
        for name, layer in known.items():
            assert layer.shape[1] == WIDTH
            assert is_placeholder(layer) == (name not in here)
        assert hook in model._forward_hooks.values()
        assert (model.of_the_script, model.training) == (1, False)
    assert len(known) == len(ROWS) - 1


def check_held(state: Any, method: str, rank: int, mesh: Any, parts: list[int]) -> None:
    """What the ranks of a pipeline tell of their layers is the model, tied layers once; and the fullest stage of any
    mesh is computed from it where stages are cut by parameters."""
    import torch

    from elastic.core.mesh import MeshSettings
    from elastic.core.sharding.mesh_memory import HeldState, HeldTensors, state_bytes, together
    from elastic.training.watch.held_state import held_state

    held, own = held_state(state, torch.device("cpu"), 1)
    last = len(ROWS) - 1

    def kinds(layers: range) -> list[HeldTensors]:
        return [
            HeldTensors(ROWS[n], WIDTH, 1, 8, 4, group=0, layer=n, also=(last,) if n == 0 else ())
            for n in layers
            if n < last or 0 not in layers
        ]

    def bytes_of(layers: range) -> int:
        numel = sum(ROWS[n] for n in layers if n < last or 0 not in layers) * WIDTH
        return numel * 8 + -(-numel // (2 * mesh.dp)) * 2 * 4

    stages = [range(begin, end) for begin, end in pairwise(parts)]
    mine = stages[mesh.stage(rank)]
    assert held.tensors == together(each for each in kinds(mine) if each.layer < last)
    assert own == bytes_of(mine)
    if method == "parameters":
        whole = HeldState("flat", together(kinds(range(len(ROWS)))))
        settings = MeshSettings(pp=mesh.pp)
        assert state_bytes(whole, settings, mesh.dp * mesh.pp) == max(map(bytes_of, stages))


if __name__ == "__main__":
    deepspeed_ranks.report_meshes(check_rank, "pp", {name: name for name in METHODS}, WORLDS)
