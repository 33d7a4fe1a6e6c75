"""Layers of experts that ranks share: which rows a rank has, what comes back from a layer, what is refused by name.

Worlds of up to 1,024 ranks under torch's fake process group; the oracles of places are this test's own rule, torch's
`compute_local_shape_and_global_offset`, and numbers that say where they are from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.core.errors import UsageError
from elastic.core.mesh import Mesh, MeshSettings
from elastic.core.sharding.cuts import Cut
from elastic.core.sharding.mesh_memory import state_bytes
from elastic.engines.fsdp2 import experts as shared
from elastic.engines.fsdp2.belongings import Belongings, parameter_groups, release
from elastic.engines.fsdp2.config import Options
from elastic.engines.fsdp2.fragments import fragments
from elastic.engines.fsdp2.layers.tensor_parallel import read_plan
from elastic.engines.fsdp2.meshes import EXPERTS as EXPERTS_AXIS
from elastic.engines.fsdp2.meshes import SAME_EXPERTS, Meshes, forget_meshes
from elastic.engines.fsdp2.pipeline.layers import read_layers
from elastic.engines.fsdp2.pipeline.sharding import shard_stage
from elastic.engines.fsdp2.sharding import repoint, shard_model
from elastic.engines.fsdp2.state import Fsdp2State
from elastic.engines.fsdp2.update.stand_ins import local_of
from elastic.engines.live_state import MASTER
from elastic.engines.model.expert_layers import NoDraws, expert_layers, require_shareable
from elastic.engines.model.pipeline import Pipeline
from elastic.training.watch.held_state import held_state

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = vars(Options())
EXPERTS, WIDTH = 8, 4


class Routed(nn.Module):
    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(experts, WIDTH))

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("tkoi,ti->tko", self.up[top_k_index], hidden) + self.bias[top_k_index]
        return (each * top_k_weights[..., None]).sum(1)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ own for part, own in zip(rows.split(counts.tolist()), self.w, strict=True)])


class Router(nn.Module):
    """What looks like experts, and is called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.norm = Router(), Routed(), nn.LayerNorm(WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].experts = Grouped()
        self.layers[0].experts.bias.requires_grad_(False)


@pytest.fixture
def world() -> Iterator[Any]:
    def begin(rank: int, size: int) -> None:
        end()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    def end() -> None:
        if dist.is_initialized():
            forget_meshes()
            dist.destroy_process_group()

    yield begin
    end()


PLAN = {"embed": RowwiseParallel(input_layouts=Replicate())}
PIPELINE = Pipeline(nn.functional.mse_loss, layers=["embed", "layers.*"])
# Of a name, by the number of stages: which of them has it. With three the first one has no experts.
STAGES: dict[int, Callable[[str], int]] = {
    1: lambda name: 0,
    2: lambda name: int(name.startswith("layers.1")),
    3: lambda name: 0 if name == "embed.weight" else 1 + int(name.split(".")[1]),
}


def sharded(model: nn.Module, ep: int, tp: int = 1, sp: int = 1, pp: int = 1, workers: int | None = None) -> Meshes:
    """Over the world that has begun, in which experts are shared by `ep` or by none, in copies over `workers`."""
    mesh, rank = Mesh.of(dist.get_world_size(), sp, tp, ep, pp), dist.get_rank()
    cell = dist.new_group(list(mesh.along("tp", rank)), use_local_synchronization=True) if tp > 1 else None
    layers, plan = require_shareable(model, (ep, 1), (tp,)), tuple(PLAN.items())
    options = {**OPTIONS, "pipeline_stages_per_rank": 1, "shard_workers": workers}
    if pp > 1:
        names = read_layers(PIPELINE, model)
        return shard_stage(model, PIPELINE, names, options, CPU, True, mesh, plan, cell, layers)[0]
    return shard_model(model, options, CPU, plan=plan, cell=cell, grid=mesh, layers=layers)


def own_rows(name: str, rows: int, rank: int, size: int, mesh: tuple[int, int, int, int]) -> tuple[range, int]:
    """By this test's own rule: the first row of a lane, and of those that it has this rank's. Blocks of rows, of a
    rank's experts over the ranks of its stage with the same ones."""
    ep, tp, sp, pp = mesh
    lane, ranks = rank % tp, size // (tp * pp)
    place = place_of(rank, tp, sp, pp)
    begin, first = 0, 0
    if tp > 1 and (".experts." in name or name.startswith("embed")):
        rows //= tp
        first = lane * rows
    if ".experts." in name:
        rows //= ep
        data, part = divmod(place, sp)
        begin, ranks, place = data % ep * rows, ranks // ep, data // ep * sp + part
    block = -(-rows // ranks)
    return range(begin + min(rows, place * block), begin + min(rows, (place + 1) * block)), first


def place_of(rank: int, tp: int, sp: int, pp: int) -> int:
    """Among the ranks with the same slices of the same layers."""
    return rank // (tp * sp * pp) * sp + rank // tp % sp


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    ("rank", "size", "ep", "tp", "sp", "pp"),
    [
        *((0, 2, 2, 1, 1, 1), (1, 2, 2, 1, 1, 1), (3, 4, 2, 1, 1, 1), (2, 4, 4, 1, 1, 1), (5, 6, 2, 1, 1, 1)),
        *((7, 12, 4, 1, 1, 1), (15, 16, 8, 1, 1, 1), (0, 1024, 8, 1, 1, 1), (517, 1024, 4, 1, 1, 1)),
        *((9, 1024, 8, 1, 1, 1), (1023, 1024, 2, 1, 1, 1), (6, 1000, 8, 1, 1, 1), (1, 2, 1, 2, 1, 1)),
        *((1, 4, 2, 2, 1, 1), (2, 4, 2, 2, 1, 1), (11, 16, 2, 4, 1, 1), (29, 32, 4, 2, 1, 1), (2, 4, 2, 1, 2, 1)),
        *((7, 12, 2, 1, 3, 1), (13, 16, 2, 2, 2, 1), (6, 8, 1, 2, 2, 1), (517, 1024, 2, 4, 1, 1)),
        *((1023, 1024, 4, 2, 1, 1), (700, 1024, 2, 2, 4, 1), (519, 1024, 8, 1, 16, 1), (37, 1000, 4, 2, 1, 1)),
        *((0, 4, 2, 1, 1, 2), (3, 4, 2, 1, 1, 2), (1, 4, 1, 2, 1, 2), (4, 6, 2, 1, 1, 3), (6, 8, 2, 2, 1, 2)),
        *((3, 8, 2, 1, 2, 2), (22, 24, 4, 1, 1, 3), (29, 32, 2, 2, 2, 2), (517, 1024, 4, 1, 1, 2)),
        *((1023, 1024, 4, 2, 1, 2), (700, 1024, 2, 2, 4, 2), (601, 1008, 4, 2, 1, 3), (46, 1000, 2, 1, 1, 2)),
    ],
)
def test_a_rank_has_the_rows_of_its_experts_that_torch_gives_it(
    world: Any, rank: int, size: int, ep: int, tp: int, sp: int, pp: int, copies: int
) -> None:
    """With copies, too, of which this rank is of the last one."""
    at, of = rank + (copies - 1) * size, copies * size
    world(at, of)
    model = Model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).float().view(parameter.shape) + 10_000 * number)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    layers = expert_layers(model)
    meshes = sharded(model, ep, tp, sp, pp, size // pp)
    assert {name for name, layer in layers.items() if isinstance(layer, FSDPModule)} == expert_layers(model).keys()
    assert all(meshes.holds(parameter) for parameter in model.parameters())
    repoint(optimizer, before, dict(model.named_parameters()))
    state = Fsdp2State(model, optimizer, None, meshes)

    whole = {name: value for name, value in whole.items() if STAGES[pp](name) == rank // (sp * tp) % pp}
    cut = {name for name in whole if tp > 1 and (".experts." in name or name.startswith("embed"))}
    assert {spec.name: spec.shape for spec in state.specs()} == {
        name: (len(w) // (tp if name in cut else 1), *w.shape[1:]) for name, w in whole.items()
    }
    assert (state.rank, state.world_size) == (place_of(at, tp, sp, pp), of // (tp * pp))
    alike = [at] if state.copies is None else dist.get_process_group_ranks(state.copies)
    assert alike == [*range(rank, of, size)]
    assert (state.cuts or {}) == {name: Cut.evenly(0, whole[name].shape, tp) for name in cut}
    found = {master.names[0]: (master.tensor, master.chunks) for master in state.masters()}
    found |= {extra.chunk.name: (extra.tensor, (extra.chunk,)) for extra in state.frozen()}
    for name, value in whole.items():
        rows, first = own_rows(name, value.shape[0], rank, size, (ep, tp, sp, pp))
        tensor, chunks = found.get(name, (value[:0], ()))
        assert torch.equal(tensor, value[first + rows.start : first + rows.stop]), name
        width = value[0].numel()
        assert [(c.start, c.numel) for c in chunks] == ([(rows.start * width, len(rows) * width)] if rows else []), name
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        box = tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))
        assert torch.equal(parameter._local_tensor, whole[name][box]), name
    starts = {chunk.name: chunk.start for master in state.masters() for chunk in master.chunks}
    engine = SimpleNamespace(module=model, optimizer=optimizer)
    assert {part.name: part.start for part in fragments(engine) if part.kind == MASTER} == starts


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    ("size", "ep", "tp", "sp"),
    [*((2, 2, 1, 1), (4, 4, 1, 1), (6, 2, 1, 1), (12, 4, 1, 1), (16, 8, 1, 1), (1024, 8, 1, 1), (1000, 8, 1, 1)),
     *((8, 2, 2, 1), (16, 2, 2, 2), (1024, 4, 2, 1), (1024, 2, 4, 1), (8, 2, 1, 2), (1000, 4, 2, 1))],
)  # fmt: skip
def test_what_the_first_rank_tells_says_what_the_fullest_one_of_any_mesh_has(
    world: Any, size: int, ep: int, tp: int, sp: int, copies: int
) -> None:
    world(0, copies * size)
    model = Model()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    meshes = sharded(model, ep, tp, sp, 1, size)
    repoint(optimizer, before, dict(model.named_parameters()))
    state = Fsdp2State(model, optimizer, None, meshes)
    held, own = held_state(state, CPU, tp)
    frozen = {extra.chunk.name for extra in state.frozen()}

    def fullest(size: int, ep: int, tp: int, sp: int) -> int:
        """In fp32, twice where there are gradients."""
        rows = {name: own_rows(name, len(value), 0, size, (ep, tp, sp, 1))[0] for name, value in whole.items()}
        return sum((4 if n in frozen else 8) * len(own) * whole[n][0].numel() for n, own in rows.items())

    assert own == fullest(size, ep, tp, sp)
    sums = sum(each._orig_size.numel() for group in parameter_groups(model) for each in group.fsdp_params
               if each.sharded_param.requires_grad)  # fmt: skip
    reduced = sum(local_of(p).numel() for group in optimizer.param_groups for p in group["params"])
    several = own + 4 * (sums - reduced)
    assert held_state(state, CPU, tp, adds_up=True)[1] == several
    assert state_bytes(replace(held, micro_steps=2), MeshSettings(sp, tp=tp, ep=ep), copies * size) == several
    assert state_bytes(held, MeshSettings(sp, tp=tp, ep=ep), copies * size) == own
    for cells, shares in ((4, 2), (6, 1), (24, 4), (64, 8), (1000, 2)):
        if EXPERTS % (shares * tp) == 0:
            settings, other = MeshSettings(sp, tp=tp, ep=shares), cells * tp * sp
            assert state_bytes(replace(held, shard_workers=0), settings, other) == fullest(other, shares, tp, sp)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("size", "ep", "tp", "sp", "pp"),
    [
        *((4, 2, 1, 1, 1), (6, 2, 1, 1, 1), (8, 8, 1, 1, 1), (12, 4, 1, 1, 1), (8, 2, 2, 1, 1), (16, 2, 2, 2, 1)),
        *((4, 2, 1, 1, 2), (12, 2, 1, 1, 3), (8, 2, 2, 1, 2), (16, 2, 2, 2, 2), (4, 1, 2, 1, 2)),
    ],
)
def test_all_ranks_together_have_each_element_once(
    world: Any, size: int, ep: int, tp: int, sp: int, pp: int, copies: int
) -> None:
    """Those of the last copy. What each lane has whole as often as there are lanes."""
    counts: dict[str, torch.Tensor] = {}
    for rank in range(size):
        world((copies - 1) * size + rank, copies * size)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
        meshes = sharded(model, ep, tp, sp, pp, size // pp)
        repoint(optimizer, before, dict(model.named_parameters()))
        state = Fsdp2State(model, optimizer, None, meshes)
        found = [chunk for master in state.masters() for chunk in master.chunks]
        found += [extra.chunk for extra in state.frozen()]
        for chunk in found:
            numel = numels[chunk.name]
            count = counts.setdefault(chunk.name, torch.zeros(numel))
            first = numel // tp * (rank % tp) if chunk.name in (state.cuts or {}) else 0
            count[first + chunk.start : first + chunk.stop] += 1
    assert counts.keys() == {name for name, _ in Model().named_parameters()}
    for name, count in counts.items():
        assert count.eq(1 if ".experts." in name or name.startswith("embed") else tp).all(), name


def test_nothing_is_left_on_a_model_that_is_given_back_and_it_is_cut_otherwise(world: Any) -> None:
    world(1, 4)
    model = Model()

    def marks() -> dict[str, Any]:
        return {name: (type(child), sorted(vars(child))) for name, child in model.named_modules()}

    def own_forward(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        return hidden

    model.layers[0].experts.forward = own_forward
    before, shapes = marks(), {name: p.shape for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    sharded(model, 4)
    repoint(optimizer, named, dict(model.named_parameters()))
    first = dict(model.named_parameters())
    assert marks() != before
    Belongings(model, optimizer).give_back()
    assert marks() == before
    assert model.layers[0].experts.forward is own_forward
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    for rank, size, ep, tp, rows in ((2, 3, 1, 1, 2), (1, 4, 2, 2, 2), (1, 4, 1, 2, 2), (0, 2, 2, 1, 4)):
        world(rank, size)
        meshes = sharded(model, ep, tp)
        assert all(meshes.holds(parameter) for parameter in model.parameters())
        assert all(now is first[name] for name, now in model.named_parameters())
        assert model.layers[0].experts.up.to_local().shape[0] == rows
        release(model)


def alone(layer: nn.Module) -> None:
    """The only rank has all of its experts, and its calls travel."""
    world = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0]], mesh_dim_names=(SAME_EXPERTS, EXPERTS_AXIS))
    meshes = Meshes(world, experts=mesh, exchange=dist.new_group([0]))
    shared.share({"experts": layer}, meshes)


class Alone:
    """The exchange of one rank that has all experts: what a layer gives must be what it gave before."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def call(self, found: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any) -> None:
        found.copy_(own)
        self.sent.append(len(own))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Routed, torch.float32), (Routed, torch.bfloat16), (Grouped, torch.float32)]
)
def test_a_layer_gives_what_it_gave_before(world: Any, kind: type[nn.Module], dtype: torch.dtype) -> None:
    """In the type that it gives: by weights in fp32 its answers to other tokens are so."""
    world(0, 1)
    torch.manual_seed(0)
    layer, generator = kind().to(dtype), torch.Generator().manual_seed(0)
    tokens = torch.randn(5, WIDTH, generator=generator).to(dtype).requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:3] for _ in range(5)])
    weights = torch.rand(5, 3, generator=generator, requires_grad=True)
    counts = torch.tensor([0, 2, 0, 1, 0, 0, 2, 0])
    given = (tokens, index, weights) if kind is Routed else (tokens, counts)
    leaves = [tokens, *([weights] if kind is Routed else []), *layer.parameters()]
    expected = layer(*given)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    alone(layer)
    exchange = Alone()
    layer.forward.exchange.call = exchange.call
    leaves = [tokens, *([weights] if kind is Routed else []), *layer.parameters()]
    found = layer(*given)
    near = {"rtol": 0.05, "atol": 0.05} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **near)
    again = torch.autograd.grad(found.square().sum(), leaves)
    for one, other in zip(again, gradients, strict=True):
        torch.testing.assert_close(one.to_local() if isinstance(one, DTensor) else one, other, **near)
    rows = 15 if kind is Routed else 5
    assert exchange.sent[:2] == [1, rows]
    assert layer.num_experts == EXPERTS


@pytest.mark.parametrize("kind", [Routed, Grouped])
def test_a_rank_that_gets_no_token_still_has_gradients(world: Any, kind: type[nn.Module]) -> None:
    world(0, 1)
    layer = kind()
    alone(layer)
    layer.forward.exchange.call = Alone().call
    tokens, weights = torch.ones(0, WIDTH, requires_grad=True), torch.ones(0, 2, requires_grad=True)
    index = torch.ones(0, 2, dtype=torch.int64)
    found = layer(tokens, index, weights) if kind is Routed else layer(tokens, torch.zeros(EXPERTS, dtype=torch.int64))
    assert found.shape == (0, WIDTH)
    found.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.to_local().any()
    assert tokens.grad is not None
    assert (weights.grad is not None) is (kind is Routed)


def member(size: int, rank: int, call: Callable[..., None]) -> shared._Cell:
    found = shared._Cell(None)
    found.size, found.rank, found.call = size, rank, call
    return found


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_the_parts_that_workers_of_a_cell_have_of_its_rows_are_all_of_them(rows: int) -> None:
    values, sent = torch.arange(rows * 2).view(rows, 2), list[torch.Tensor]()
    for rank in range(3):
        cell = member(3, rank, lambda into, own, group: sent.append(own))
        assert cell.whole(values[cell.part(rows)], rows).shape == values.shape
    assert torch.equal(torch.cat(sent)[:rows], values)
    assert len({each.shape for each in sent}) == 1


def test_workers_of_a_cell_that_choose_otherwise_are_refused(world: Any) -> None:
    """In the grouped form, in which a row's place says whose it is."""
    world(0, 1)
    layer = Grouped()
    alone(layer)

    def other(into: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        into.copy_(torch.cat([own, own.flip(-1)]))

    layer.forward.cell = member(2, 0, other)
    with pytest.raises(UsageError, match="'experts' was given other numbers of tokens on some workers of a cell"):
        layer(torch.ones(1, WIDTH), torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]))


def test_a_plan_is_of_what_is_no_layer_of_experts() -> None:
    model, own = Model(), {"embed": "embedding_rowwise", "layers.*.experts": "moe", "layers.*.experts.up": "packed"}
    model._tp_plan = own
    layers = require_shareable(model, (2,), (2,))
    assert [name for name, _ in read_plan(None, model, 2, experts=layers)] == ["embed"]
    with pytest.raises(UsageError, match=r"the style 'moe' of 'layers\.0\.experts' is not supported"):
        read_plan(None, model, 2)
    with pytest.raises(UsageError, match=r"'layers\.\*\.experts' says how 'layers\.0\.experts' is cut, whose experts"):
        read_plan({**PLAN, "layers.*.experts": ColwiseParallel()}, model, 2, experts=layers)
    with pytest.raises(
        UsageError, match=r"mesh: {tp: 4, ep: 4}: .* which 16 workers cannot share evenly; use an ep and"
    ):
        require_shareable(model, (4,), (4,))


def test_a_graph_that_outlives_its_generation_keeps_no_group(world: Any) -> None:
    world(0, 1)
    layer = Grouped()
    alone(layer)
    layer.forward.exchange.call = Alone().call
    found = layer(torch.ones(1, WIDTH, requires_grad=True), torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]))
    shared.end_exchanges(layer)
    assert layer.forward.exchange._group is None
    with pytest.raises(RuntimeError, match="after the end of their generation"):
        found.sum().backward()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.ones(3, 4), torch.ones(3, 2), torch.ones(3, 2)), "must be called with .*numbers of experts"),
        ((torch.ones(3, 4), torch.ones(3, dtype=torch.int64), torch.ones(3, 1)), r"was with \[3, 4\], \[3\], \[3, 1\]"),
        ((torch.ones(3, 4), 2, None), "must be called with tensors alone, not"),
        ((torch.ones(1, 4), torch.tensor([[8]]), torch.ones(1, 1)), "'experts' was given the number 8 of an expert"),
    ],
)
def test_a_layer_that_is_called_otherwise_is_refused_by_name(world: Any, given: Any, said: str) -> None:
    world(0, 1)
    layer = Routed()
    alone(layer)
    with pytest.raises(UsageError, match=said):
        layer(*given)


def test_layers_are_found_by_what_they_are_called_with() -> None:
    assert list(expert_layers(Model())) == ["layers.0.experts", "layers.1.experts"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: delattr(model, "layers"), r"mesh: {ep: 4}: Model has no layer of experts that can be shared"),
        (
            lambda model: setattr(model.layers[0], "experts", Routed(6)),
            r"mesh: {ep: 4}: 'layers\.0\.experts' has 6 experts, which 4 workers cannot share evenly",
        ),
        (
            lambda model: model.layers[0].experts.register_buffer("seen", torch.zeros(EXPERTS)),
            r"'layers\.0\.experts' has buffers, .* \(seen\)",
        ),
        (
            lambda model: setattr(model.layers[0].experts, "scales", torch.ones(EXPERTS)),
            r"'layers\.0\.experts' has a tensor that is no parameter \(scales\)",
        ),
        (
            lambda model: setattr(model.layers[1].experts, "w", model.layers[0].experts.up),
            r"'layers\.0\.experts' shares a tensor with another module \(up\)",
        ),
        (lambda model: model.layers[0].experts.compile(backend="eager"), r"'layers\.0\.experts' is compiled itself"),
        (
            lambda model: setattr(model.layers[1], "experts", torch.compile(model.layers[1].experts, backend="eager")),
            r"'layers\.1\.experts' is compiled itself",
        ),
        (
            lambda model: model.layers[1].compile(backend="eager", fullgraph=True),
            r"'layers\.1' is compiled with fullgraph=True, and 'layers\.1\.experts' in it",
        ),
        (
            lambda model: model.layers.insert(1, torch.compile(model.layers.pop(1), backend="eager", fullgraph=True)),
            r"'layers\.1' is compiled with fullgraph=True, and 'layers\.1\.experts' in it",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(change: Any, said: str) -> None:
    """In any generation of the run: the first one may have all experts on each rank."""
    model = Model()
    change(model)
    with pytest.raises(UsageError, match=said):
        require_shareable(model, (1, 2, 4))


def test_what_is_compiled_around_layers_changes_no_names() -> None:
    model = Model()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1].norm.compile(backend="eager", fullgraph=True)
    model.compile(backend="eager")
    assert list(require_shareable(model, (1, 2))) == ["layers.0.experts", "layers.1.experts"]


def test_a_sharding_of_the_scripts_own_is_refused(world: Any) -> None:
    world(0, 2)
    model = Model()
    fully_shard(model)
    with pytest.raises(UsageError, match=r"the script has called fully_shard itself, and mesh\.ep shares experts"):
        sharded(model, 2)


def test_draws_are_noticed_in_the_first_pass_that_trains() -> None:
    layer, inputs = Routed(), (torch.ones(1),)
    draws = NoDraws("experts")
    for training, drawn in ((False, True), (True, False), (True, True)):
        layer.train(training)
        draws.begin(layer, inputs)
        if drawn:
            torch.rand(1)
        draws.end(layer, inputs)
    again = NoDraws("experts")
    again.begin(layer, inputs)
    torch.rand(1)
    with pytest.raises(UsageError, match="the experts of the MoE layer 'experts' draw random numbers"):
        again.end(layer, inputs)
