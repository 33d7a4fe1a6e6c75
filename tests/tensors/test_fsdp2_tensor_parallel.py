"""Plans of tensor parallelism: what they cut, what is refused by name, and which rows a rank then has.

Worlds of up to 1,024 ranks under torch's fake process group; the oracle of places is torch's own
`compute_local_shape_and_global_offset`, and that of content, numbers that say where they are from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.comm.lanes import Lanes
from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, MeshSettings
from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.mesh_memory import state_bytes
from elastic.engines.fsdp2.belongings import release
from elastic.engines.fsdp2.config import Options
from elastic.engines.fsdp2.fragments import fragments
from elastic.engines.fsdp2.layers.tensor_parallel import is_known, read_plan, require_even, require_local
from elastic.engines.fsdp2.meshes import forget_meshes, make_meshes
from elastic.engines.fsdp2.sharding import repoint, shard_model
from elastic.engines.fsdp2.state import Fsdp2State
from elastic.engines.live_state import MASTER
from elastic.training.watch.held_state import held_state

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = vars(Options())
WHOLE_INPUT, WHOLE_OUTPUT = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, wide), nn.Linear(wide, 16), nn.LayerNorm(16)


class Model(nn.Module):
    """`tied`: the head has the embedding's matrix."""

    def __init__(self, wide: int = 80, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(Block(wide) for _ in range(2))
        self.head = nn.Linear(16, 40, bias=False)
        self.layers[1].norm.weight.requires_grad_(False)
        if tied:
            self.head.weight = self.embed.weight


PLAN: dict[str, Any] = {
    "embed": WHOLE_INPUT,
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "layers.1.norm": SequenceParallel(),
    "head": WHOLE_OUTPUT,
}
# The dimension that is cut.
CUT = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}


@pytest.fixture
def world() -> Iterator[Any]:
    """The group of a rank's cell, in a world of this size."""

    def begin(rank: int, size: int, tp: int, sp: int = 1) -> Any:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        return dist.new_group(list(Mesh.of(size, sp, tp).along("tp", rank)), use_local_synchronization=True)

    yield begin
    if dist.is_initialized():
        forget_meshes()
        dist.destroy_process_group()


def own_slice(whole: torch.Tensor, name: str, tp: int, lane: int) -> torch.Tensor:
    """By this test's own rule."""
    dims = [dim for end, dim in CUT.items() if name.endswith(end)]
    return whole.chunk(tp, dims[0])[lane].contiguous() if dims else whole


@pytest.mark.parametrize(
    ("rank", "size", "tp", "sp", "workers"),
    [
        *((0, 2, 2, 1, None), (3, 4, 2, 1, None), (5, 12, 4, 1, None), (11, 12, 4, 1, None), (38, 40, 8, 1, None)),
        *((7, 1000, 5, 1, None), (0, 1024, 8, 1, None), (517, 1024, 8, 1, None), (1023, 1024, 8, 1, None)),
        *((2, 4, 2, 2, None), (7, 24, 4, 3, None), (93, 120, 5, 4, None), (519, 1024, 8, 4, None)),
        *((1023, 1024, 2, 8, None), (700, 1024, 4, 16, None)),
        *((6, 8, 2, 1, 4), (7, 24, 2, 2, 8), (517, 1024, 8, 1, 16), (1023, 1024, 8, 2, 64), (700, 1024, 4, 4, 512)),
    ],
)
def test_a_rank_has_the_rows_of_its_slice_that_torch_gives_it(
    world: Any, rank: int, size: int, tp: int, sp: int, workers: int | None
) -> None:
    cell = world(rank, size, tp, sp)
    model = Model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).float().view(parameter.shape) + 10_000 * number)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    options = {**OPTIONS, "shard_workers": workers}
    meshes = shard_model(model, options, CPU, plan=read_plan(PLAN, model, tp), cell=cell)
    repoint(optimizer, before, dict(model.named_parameters()))
    state = Fsdp2State(model, optimizer, None, meshes)

    slices = {name: own_slice(value, name, tp, rank % tp) for name, value in whole.items()}
    assert {spec.name: spec.shape for spec in state.specs()} == {name: tuple(s.shape) for name, s in slices.items()}
    assert (state.rank, state.world_size) == (rank // tp, size // tp)
    mesh = Mesh.of(size, sp, tp)
    assert meshes.tp is not None
    assert (mesh.tensor(rank), mesh.data(rank) * sp + mesh.sequence(rank)) == (meshes.tp.get_local_rank(), state.rank)
    lane = [other for other in range(size) if mesh.lane(other) == mesh.lane(rank)]
    every = [dist.get_process_group_ranks(each.get_group()) for each in (meshes.tp, meshes.dp)]
    assert every == [[*mesh.along("tp", rank)], lane]
    if workers is not None:
        copies, once = ([*map(lane.index, dist.get_process_group_ranks(group))] for group in (state.copies, state.once))
        shards, at = workers // tp, lane.index(rank)
        assert copies == [*range(at % shards, len(lane), shards)]
        assert once == [*range(at // shards * shards, at // shards * shards + shards)]
    found = {master.names[0]: (master.tensor, master.chunks) for master in state.masters()}
    found |= {extra.chunk.name: (extra.tensor, (extra.chunk,)) for extra in state.frozen()}
    for name, (tensor, chunks) in found.items():
        flat = slices[name].flatten()
        assert torch.equal(tensor.flatten(), torch.cat([flat[c.start : c.stop] for c in chunks] or [flat[:0]])), name
    assert_torch_says_so(model, whole)

    class Engine:
        module = model

    engine: Any = Engine()
    engine.optimizer = optimizer
    starts = {chunk.name: chunk.start for master in state.masters() for chunk in master.chunks}
    assert {part.name: part.start for part in fragments(engine) if part.kind == MASTER} == starts


@pytest.mark.parametrize(
    ("rank", "size", "sp", "tp", "pp", "workers"),
    [
        *((5, 8, 2, 2, 2, None), (3, 8, 2, 1, 4, None), (17, 24, 3, 2, 2, None)),
        *((519, 1024, 4, 8, 2, None), (1023, 1024, 2, 1, 8, None), (640, 960, 4, 2, 5, None)),
        *((6, 8, 1, 1, 2, 2), (5, 8, 1, 1, 2, 4), (5, 8, 2, 1, 2, 2), (13, 16, 2, 2, 2, 4), (7, 12, 2, 1, 2, 3)),
        *((519, 1024, 4, 8, 2, 64), (1023, 1024, 2, 1, 8, 16), (640, 960, 4, 2, 5, 48)),
    ],
)
def test_groups_of_a_rank_with_stages_are_those_of_its_coordinates(
    world: Any, rank: int, size: int, sp: int, tp: int, pp: int, workers: int | None
) -> None:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    mesh = Mesh.of(size, sp, tp, pp=pp)
    cell = dist.new_group(list(mesh.along("tp", rank)), use_local_synchronization=True) if tp > 1 else None
    meshes = make_meshes(CPU, cell, mesh, workers)
    assert meshes.pp is not None
    assert dist.get_process_group_ranks(meshes.pp) == list(mesh.along("pp", rank))
    lane = [other for other in range(size) if mesh.lane(other) == mesh.lane(rank)]
    assert dist.get_process_group_ranks(meshes.dp.get_group()) == lane
    assert (meshes.dp.get_local_rank(), meshes.lanes) == (mesh.data(rank) * sp + mesh.sequence(rank), tp * pp)
    own = None if meshes.tp is None else dist.get_process_group_ranks(meshes.tp.get_group())
    assert own == (list(mesh.along("tp", rank)) if tp > 1 else None)
    shards = len(lane) if workers is None else workers // tp
    assert (
        dist.get_process_group_ranks(meshes.shards.get_group())
        == (lane[lane.index(rank) // shards * shards :][:shards])
    )
    alike = lane[lane.index(rank) % shards :: shards]
    copies = [rank] if meshes.copies is None else dist.get_process_group_ranks(meshes.copies)
    assert copies == alike
    if meshes.copies is not None and workers is not None:
        shard = lane.index(rank) % shards * tp + mesh.tensor(rank)
        among = Lanes.of_copies(meshes.copies, Lanes.of(meshes.dp.get_group(), CPU, mesh), CPU, shard)
        assert (among.index, among.count) == (mesh.stage(rank) * workers + shard, pp * workers)


@pytest.mark.parametrize(
    ("size", "tp", "sp", "workers"),
    [
        *((2, 2, 1, None), (4, 2, 1, None), (12, 4, 1, None), (40, 8, 1, None), (1000, 5, 1, None), (1024, 8, 1, None)),
        *((24, 4, 3, None), (120, 5, 4, None), (1024, 2, 8, None), (8, 2, 1, 4), (24, 2, 2, 8), (1024, 8, 2, 64)),
    ],
)
def test_what_the_first_rank_tells_says_what_the_fullest_one_of_any_mesh_has(
    world: Any, size: int, tp: int, sp: int, workers: int | None
) -> None:
    """The rule of this test: blocks of rows of a slice, of fp32, twice where there are gradients."""
    cell = world(0, size, tp, sp)
    model = Model()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    meshes = shard_model(model, {**OPTIONS, "shard_workers": workers}, CPU, plan=read_plan(PLAN, model, tp), cell=cell)
    repoint(optimizer, before, dict(model.named_parameters()))
    state = Fsdp2State(model, optimizer, None, meshes)
    held, own = held_state(state, CPU, tp)
    frozen = {extra.chunk.name for extra in state.frozen()}

    def fullest(tp: int, shards: int, adds_up: bool = False) -> int:
        slices = {name: own_slice(value, name, tp, 0) for name, value in whole.items()}
        blocks = {name: -(-len(value) // shards) * value[0].numel() for name, value in slices.items()}
        gradients = {name: slices[name].numel() if adds_up else numel for name, numel in blocks.items()}
        return 4 * sum(numel + (gradients[name] if name not in frozen else 0) for name, numel in blocks.items())

    shards = (workers or size) // tp
    assert own == fullest(tp, shards)
    several = replace(held, micro_steps=2)
    assert held_state(state, CPU, tp, adds_up=True)[1] == fullest(tp, shards, adds_up=True)
    assert state_bytes(several, MeshSettings(sp, tp=tp), size) == fullest(tp, shards, adds_up=True)
    assert state_bytes(held, MeshSettings(sp, tp=tp), size) == own
    for other, slices in ((3, 1), (12, 2), (20, 5), (64, 8), (1000, 5)):
        assert state_bytes(replace(held, shard_workers=0), MeshSettings(tp=slices), other) == fullest(
            slices, other // slices
        ), (other, slices)


def assert_torch_says_so(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        box = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        assert torch.equal(parameter._local_tensor, whole[name][box]), name


def test_the_plan_keeps_what_is_tied_and_what_is_frozen(world: Any) -> None:
    cell = world(1, 4, 2)
    model = Model()
    shard_model(model, OPTIONS, CPU, plan=read_plan(PLAN, model, 2), cell=cell)
    assert model.head.weight is model.embed.weight
    assert not model.layers[1].norm.weight.requires_grad
    assert model.layers[1].norm.bias.requires_grad


class TurnedBefore(ColwiseParallel):
    """A user's own style: rows in another order than their placement says."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        turn(module.parameters())
        return super()._apply(module, device_mesh)


class TurnedAfter(ColwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        found = super()._apply(module, device_mesh)
        for name, parameter in list(module.named_parameters()):
            own: Any = parameter
            turned = DTensor.from_local(own.to_local().flip(0).contiguous(), device_mesh, own.placements)
            module.register_parameter(name, nn.Parameter(turned))
        return found


def turn(parameters: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.flip(0))


@pytest.mark.parametrize(
    ("style", "said"),
    [
        (TurnedBefore(), "its values were changed where they were before it was cut"),
        (TurnedAfter(), "a slice of it is not the part that it is said to be, [(20, 40)] of dimension 0"),
    ],
)
def test_slices_are_what_placements_say_and_values_confirm_it(world: Any, style: ColwiseParallel, said: str) -> None:
    cell = world(5, 12, 4)
    model = Model()
    with torch.no_grad():
        # One value in all of it, as biases are made.
        model.layers[0].up.bias.fill_(0.5)
    plan = {**PLAN, "layers.0.up": ColwiseParallel(), "layers.1.up": style}
    del plan["layers.*.up"]
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    meshes = shard_model(model, OPTIONS, CPU, plan=read_plan(plan, model, 4), cell=cell)
    repoint(optimizer, before, dict(model.named_parameters()))
    cuts = Fsdp2State(model, optimizer, None, meshes).cuts
    assert cuts == {
        "embed.weight": Cut.evenly(0, (40, 16), 4),
        "layers.0.up.weight": Cut.evenly(0, (80, 16), 4),
        "layers.0.up.bias": Cut.evenly(0, (80,), 4),
        "layers.0.down.weight": Cut.evenly(1, (16, 80), 4),
        "layers.1.down.weight": Cut.evenly(1, (16, 80), 4),
        "layers.1.up.weight": said,
        "layers.1.up.bias": said,
    }
    bias: Any = model.layers[0].up.bias
    assert set(bias.to_local().tolist()) == {0.5}, "random ones while it was cut"


def test_without_shared_layers_nothing_is_said_of_cuts(world: Any) -> None:
    world(0, 2, 1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Fsdp2State(model, optimizer, None, shard_model(model, OPTIONS, CPU)).cuts is None


def test_nothing_of_a_plan_is_left_on_a_model_that_is_given_back(world: Any) -> None:
    cell = world(1, 4, 2)
    model = Model()
    model.layers[0].up.register_forward_hook(lambda *_: None)

    def hooks(module: nn.Module) -> list[int]:
        return [len(held) for kind, held in vars(module).items() if "_hooks" in kind and held]

    def marks() -> dict[str, Any]:
        return {name: (type(child), sorted(vars(child)), hooks(child)) for name, child in model.named_modules()}

    before, shapes = marks(), {name: p.shape for name, p in model.named_parameters()}
    shard_model(model, OPTIONS, CPU, plan=read_plan(PLAN, model, 2), cell=cell)
    assert marks() != before
    release(model)
    assert marks() == before
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    dist.destroy_process_group()
    # As another rank, of which the first one's mesh must not be found.
    cell = world(2, 4, 2)
    meshes = shard_model(model, OPTIONS, CPU, plan=read_plan(PLAN, model, 2), cell=cell)
    assert all(meshes.holds(parameter) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight


def test_names_of_styles_as_models_of_transformers_have_them() -> None:
    model = Model()
    with pytest.raises(UsageError, match="nothing says how the layers of Model are cut; pass tp_plan="):
        read_plan(None, model, 2)
    model._tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.experts": "moe_tp_experts"}
    plan = read_plan(None, model, 2)
    assert [name for name, _ in plan] == ["layers.0.up", "layers.1.up", "layers.0.down", "layers.1.down"]
    assert is_known(plan)
    model._tp_plan = {"layers.*.up": "packed_colwise"}
    with pytest.raises(UsageError, match=r"the style 'packed_colwise' of 'layers\.0\.up' is not supported"):
        read_plan(None, model, 2)
    model._tp_plan = {"layers.*.norm.weight": "colwise"}
    with pytest.raises(UsageError, match=r"no module 'layers\.\*\.norm\.weight'"):
        read_plan(None, model, 2)
    model._tp_plan = {"blocks.*.up": "colwise"}
    with pytest.raises(UsageError, match="is a module of Model; pass tp_plan= that fits"):
        read_plan(None, model, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layer.*.up": ColwiseParallel()}, r"no module 'layer\.\*\.up'; it has embed, layers, layers\.0"),
        ({"embed": 3}, "'embed' has a int, which is neither a style"),
        (
            {"layers.*.up": ColwiseParallel(), "layers.0.*": ColwiseParallel()},
            r"'layers\.\*\.up' and 'layers\.0\.\*' both say how 'layers\.0\.up' is cut; leave one out",
        ),
        ([ColwiseParallel()], "nothing says how the layers of Model are cut"),
    ],
)
def test_plans_that_do_not_fit_the_model(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_plan(given, Model(), 2)


def test_projections_in_one_matrix_are_not_cut_across() -> None:
    model = Model()
    for name in ("qkv_proj", "Wqkv", "c_attn", "gate_up_proj"):
        model.add_module(name, nn.Linear(16, 48))
        with pytest.raises(UsageError, match=f"'{name}' holds several projections"):
            read_plan({name: ColwiseParallel()}, model, 2)
        assert read_plan({name: WHOLE_OUTPUT}, model, 2)


@pytest.mark.parametrize(("name", "rows"), [("wqkv", 6 * 4 * 2), ("wk", 6 * 2)])
def test_torchtitans_projections_are_cut_between_heads(name: str, rows: int) -> None:
    """Six of keys, of two rows each; in one matrix two of queries, a key and a value are together for each of them."""
    model: Any = Model()
    model.attention = nn.ModuleDict({name: nn.Linear(16, rows)})
    model.attention.r_dim, model.attention.head_dim = 4, 2
    plan = {f"attention.{name}": ColwiseParallel()}
    assert read_plan(plan, model, 2, 3)
    with pytest.raises(UsageError, match=rf"'attention\.{name}' has 6 heads, which 4 workers cannot share evenly"):
        read_plan(plan, model, 2, 4)


@pytest.mark.parametrize(
    ("plan", "wide", "said"),
    [
        ({"layers.*.up": "colwise"}, 81, r"'layers\.0\.up\.weight' of shape \(81, 16\) cannot be cut along dimension"),
        ({"embed": WHOLE_INPUT}, 80, r"'embed\.weight' and 'head\.weight' are one"),
        ({"embed": ColwiseParallel(), "head": WHOLE_OUTPUT}, 80, r"'embed\.weight' and 'head\.weight' are one"),
        ({"layers.*.norm": SequenceParallel()}, 80, "tp_plan cuts no parameter"),
        ({"layers.*": ColwiseParallel()}, 80, r"ColwiseParallel cannot be applied to 'layers\.0', a Block"),
    ],
)
def test_what_a_plan_cannot_cut_is_refused_by_name(world: Any, plan: dict[str, Any], wide: int, said: str) -> None:
    cell = world(1, 4, 2)
    model = Model(wide)
    with pytest.raises(UsageError, match=said):
        shard_model(model, OPTIONS, CPU, plan=read_plan(plan, model, 2), cell=cell)


def test_what_other_generations_could_not_share_is_refused_by_name(world: Any) -> None:
    """Where layers are shared now: the plan alone does not say along which sizes it cuts."""
    model = Model()
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=4, hidden_size=16)  # type: ignore[assignment]
    shard_model(model, OPTIONS, CPU, plan=read_plan(PLAN, model, 2, 1, 4), cell=world(1, 4, 2))
    require_even(model, (1, 2, 4))
    with pytest.raises(UsageError, match=r"'.*' of shape .* cannot be cut along dimension . by mesh: {tp: 7}"):
        require_even(model, (2, 7))
    whole = nn.ModuleDict({"q_proj": nn.Linear(16, 16)})
    whole.config = model.config  # type: ignore[assignment]
    assert read_plan({"q_proj": ColwiseParallel()}, whole, 1, 2, 4)
    with pytest.raises(UsageError, match=r"mesh: {tp: 3}: 'q_proj' has 4 heads, which 3 workers cannot share evenly"):
        read_plan({"q_proj": ColwiseParallel()}, whole, 1, 2, 3)
    with pytest.raises(UsageError, match=r"mesh: {tp: 2}: nothing says how the layers of ModuleDict are cut"):
        read_plan(None, whole, 1, 2)


def test_outputs_that_are_not_whole_are_refused(world: Any) -> None:
    world(0, 2, 2)
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    require_local({"logits": torch.ones(2), "cache": None}, "the model's output")
    with pytest.raises(UsageError, match="the model's output is a DTensor; let tp_plan give plain tensors"):
        require_local({"logits": DTensor.from_local(torch.ones(2), mesh, [Shard(0)])}, "the model's output")
