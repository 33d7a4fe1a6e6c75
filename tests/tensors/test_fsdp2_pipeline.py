"""A model as a row of layers: which it has, what is left of it on a rank, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from elastic import Pipeline
from elastic.core.errors import UsageError
from elastic.core.mesh import MeshSettings
from elastic.core.sharding.mesh_memory import HeldState, HeldTensors, state_bytes, together
from elastic.core.sharding.stages import holders, interleaved
from elastic.engines.fsdp2.pipeline.layers import Chain, Cut, cut, layer_of, layers_by_name, prune, read_layers
from elastic.engines.fsdp2.pipeline.schedules import as_torch_has_it
from elastic.engines.model.description import aliases
from elastic.engines.model.plain_names import named_modules
from elastic.training.user.padding import PaddingBuffers

ROW = ["embed", "layers.*", "norm", "head"]


class Whole(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def pipeline(**more: Any) -> Pipeline:
    return Pipeline(nn.functional.cross_entropy, **{"layers": ROW, **more})


def staged(model: nn.Module, ranks: int, rank: int, per_rank: int = 1, **more: Any) -> Cut:
    return cut(pipeline(**more), read_layers(pipeline(**more), model), model, ranks, rank, per_rank)


def test_patterns_name_layers_in_the_models_order() -> None:
    names = ("embed", *(f"layers.{n}" for n in range(12)), "norm", "head")
    assert read_layers(pipeline(), Whole()) == tuple((name,) for name in names)
    row = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert read_layers(pipeline(layers=None), row) == (("0",), ("1",), ("2",))


@pytest.mark.parametrize("per_rank", [1, 2, 4])
def test_stages_one_after_another_are_the_whole_model_under_its_names(per_rank: int) -> None:
    words, whole = torch.arange(6), Whole(tied=True)
    x: Any = words
    for layer in (whole.embed, *whole.layers, whole.norm, whole.head):
        x = layer(x)
    given: Any = (words,)
    names: dict[str, torch.Tensor] = {}
    chains = []
    for rank in range(3):
        model = Whole(tied=True)
        model.load_state_dict(whole.state_dict())
        found = staged(model, 3, rank, per_rank)
        assert found.tied == {"embed.weight": (0, 2)}
        assert found.stages == tuple(range(rank, 3 * per_rank, 3))
        prune(model, found)
        chains.append(Chain(model, found))
        names |= dict(model.named_parameters())
        own = {found.names[number] for number in found.own}
        assert {name for name, _ in named_modules(model) if name in found.names} == own
        # The head's weight has the name that it has in the whole model, on each rank that holds it.
        assert aliases(model) == ({"head.weight": "embed.weight"} if rank != 1 else {})
    for stage in range(3 * per_rank):
        chain = chains[stage % 3]
        chain.stage = stage
        given = (chain(*given),)
    assert torch.equal(given[0], x)
    assert {name: value.shape for name, value in names.items()} == {n: p.shape for n, p in whole.named_parameters()}


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_fullest_stage_of_any_pipeline_is_known_from_the_layers(tied: bool, per_rank: int) -> None:
    model = Whole(tied=tied)
    row = read_layers(pipeline(), model)
    layers = layers_by_name(model, row)
    assert layers["embed.weight"] == ((0, len(row) - 1) if tied else (0,))
    held = HeldState("rows", together(
        HeldTensors(len(p), p[0].numel(), data_bytes=1, group=0, layer=layers[n][0], also=layers[n][1:])
        for n, p in model.named_parameters()
    ))  # fmt: skip
    for ranks in (1, 2, 3, 5):
        own = []
        for rank in range(ranks):
            found = staged(model, ranks, rank, per_rank)
            parameters = {id(p): p for number in found.own for p in layer_of(model, found.names[number]).parameters()}
            own.append(sum(parameter.numel() for parameter in parameters.values()))
        settings = MeshSettings(pp=ranks, stages_per_rank=per_rank)
        assert state_bytes(held, settings, ranks) == max(own), ranks


def test_layers_that_begin_stages_may_be_named() -> None:
    begins = {2: ["embed", "layers.1"]}
    assert staged(Whole(), 2, 1, begins=begins).begins == (0, 2)
    assert staged(Whole(), 3, 1, begins=begins).begins == staged(Whole(), 3, 1).begins


@pytest.mark.parametrize(("back", "style"), [(False, "loop"), (True, "v")])
def test_ranks_have_the_stages_that_torchs_schedules_give_them(back: bool, style: str) -> None:
    for ranks, per_rank in ((2, 2), (3, 2), (4, 3)):
        expected = generate_stage_to_rank_mapping(ranks, ranks * per_rank, style)
        assert dict(enumerate(holders(ranks, per_rank, back))) == expected


def test_what_two_stages_of_one_rank_share_is_tied_to_no_other() -> None:
    model = Whole(tied=True)
    found = cut(pipeline(), read_layers(pipeline(), model), model, 3, 0, 2, back=True)
    prune(model, found)
    assert (found.stages, found.tied) == ((0, 5), {})
    assert model.head.weight is model.embed.weight


def test_as_many_stages_as_there_are_layers_for() -> None:
    assert len(staged(Whole(), 4, 0, 5).begins) == 12, "of 15 layers three for each of four ranks"
    assert len(staged(Whole(), 1, 0, 5).begins) == 1, "nobody to share with"
    with pytest.raises(UsageError, match="16 stages need 16 layers with trained parameters, and the pipeline has 15"):
        staged(Whole(), 16, 0, 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("per_rank", [2, 3])
def test_the_interleaved_order_is_torchs_and_goes_on_where_torch_refuses(ranks: int, per_rank: int) -> None:
    for passes in range(1, 4 * ranks):
        order = interleaved(ranks, per_rank, passes)
        for rank, own in enumerate(order):
            every = [(stage, way, n) for stage in range(rank, ranks * per_rank, ranks) for way in (True, False)
                     for n in range(passes)]  # fmt: skip
            assert sorted(own) == sorted(every), "each pass once"
        # Raises for an order in which a rank would wait for ever.
        runtime = _PipelineScheduleRuntime(fakes(ranks, per_rank), passes, print)
        made = {rank: [as_torch_has_it(*one) for one in own] for rank, own in enumerate(order)}
        runtime._prepare_schedule_with_comms({rank: list(own) for rank, own in made.items()})
        if passes % max(1, passes // ranks) == 0:
            torchs = ScheduleInterleaved1F1B(fakes(ranks, per_rank), passes, print)
            for rank, own in made.items():
                assert [one for one in torchs._calculate_single_rank_operations(rank) if one is not None] == own
        else:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                ScheduleInterleaved1F1B(fakes(ranks, per_rank), passes, print)


def fakes(ranks: int, per_rank: int) -> list[Any]:
    """The stages of rank 0, as far as torch's schedules look at them before they run."""
    return [SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0) for _ in range(per_rank)]


def test_a_padding_pass_through_one_stage_is_before_the_real_ones_of_another() -> None:
    early, late, kept = nn.BatchNorm1d(2), nn.BatchNorm1d(2), PaddingBuffers()
    kept.keep(early)
    early(torch.ones(3, 2))
    late(torch.ones(3, 2))
    kept.keep(late)
    late(torch.ones(3, 2))
    kept.restore()
    assert [int(layer.num_batches_tracked) for layer in (early, late)] == [0, 1]


class _Stray(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class _Shared(Whole):
    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(3)
        self.norm.register_buffer("table", table)
        self.head.register_buffer("table", table)


class _Frozen(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        (Whole, {"layers": None}, "nothing says which layers Whole has"),
        (Whole, {"layers": ["embed", "blocks.*"]}, "the model has no module 'blocks.*'; it has embed, layers"),
        (Whole, {"layers": [*ROW, "norm"]}, "layers names 'norm' twice"),
        (Whole, {"layers": ["embed", "layers", "layers.3", "norm", "head"]}, "'layers.3', which is a part of it"),
        (Whole, {"layers": ROW[:-1]}, "'head.weight' is of no layer of the pipeline"),
        (_Stray, {}, "'scale' is of no layer of the pipeline"),
        (_Shared, {}, "buffer 'head.table' is shared by several layers"),
        (Whole, {"begins": {2: ["embed", "layers.99"]}}, "begins for 2 stages must name 2 layers"),
        (Whole, {"begins": {2: ["layers.0", "layers.1"]}}, "the first of them 'embed'"),
        (Whole, {"begins": {2: ["embed"]}}, "must name 2 layers in their order"),
        (_Frozen, {"begins": {2: ["embed", "head"]}}, "stage 1 of 2 has no trained parameters (head)"),
    ],
)
def test_what_is_no_row_of_layers_is_refused_by_name(model: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        staged(model(), 2, 0, **more)
    assert said in str(raised.value)


def test_a_model_that_was_cut_before_is_refused() -> None:
    model = Whole()
    prune(model, staged(model, 2, 0))
    with pytest.raises(UsageError, match="was cut into stages before; build it in the training function"):
        read_layers(pipeline(), model)


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes an elastic\.Pipeline, not a list"):
        read_layers(["embed"], Whole())
