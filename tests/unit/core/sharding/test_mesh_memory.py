"""What memory a mesh would need, from what was measured of others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.core.errors import UsageError
from elastic.core.mesh import MeshSettings
from elastic.core.sharding.mesh_memory import (
    CutBy,
    HeldState,
    HeldTensors,
    KnownMemory,
    MemoryReports,
    MeshMemory,
    growth,
    predict,
    state_bytes,
    together,
)
from elastic.core.sharding.zero import zero12_layout
from elastic.core.typed_json import encode

GIB = 1 << 30
EVERY: tuple[CutBy, ...] = ("whole", "flat", "elements", "rows")
LAYERS = MeshSettings(tp=4, choices={"tp": (1, 2, 4)})
EXPERTS = MeshSettings(ep=4, choices={"ep": (1, 2, 4)})
STAGES = MeshSettings(pp=4, choices={"pp": (1, 2, 4)})


def model(cut_by: CutBy = "rows", **more: Any) -> HeldState:
    """Twelve layers between an embedding and a head that are tied, each with a matrix that is cut either way, one that
    is not, and experts."""
    block = [
        HeldTensors(64, 32, 1, 2, 12, cut=0, group=0),
        HeldTensors(32, 64, 1, 2, 12, cut=1, group=0),
        HeldTensors(32, 1, 2, 2, 12, group=0),
        HeldTensors(8, 96, 3, 2, 12, experts=1, group=1),
    ]
    ends = HeldTensors(100, 32, 1, 2, 12, cut=0, group=0, also=(13,))
    return HeldState(cut_by, (ends, *(each._replace(layer=1, layers=12) for each in block)), slices=2, **more)


tensors = st.builds(
    HeldTensors,
    rows=st.integers(1, 40), width=st.integers(1, 9), number=st.integers(1, 3), lane_bytes=st.sampled_from((0, 2, 4)),
    data_bytes=st.sampled_from((0, 8, 12)), cut=st.integers(-1, 1), experts=st.integers(0, 2),
    group=st.integers(0, 2), layer=st.integers(0, 5), layers=st.integers(1, 4), also=st.just(()),
    reached_bytes=st.sampled_from((0, 2, 4)), summed_bytes=st.sampled_from((0, 2, 4)),
    reduced_bytes=st.sampled_from((0, 4)),
).map(lambda each: each._replace(reduced_bytes=min(each.reduced_bytes, each.data_bytes)))  # fmt: skip
states = st.builds(
    HeldState,
    st.sampled_from(EVERY),
    st.lists(tensors, min_size=4, max_size=8).map(together),
    shard_workers=st.just(0),
    slices=st.just(1),
    passes=st.integers(1, 60),
    micro_steps=st.sampled_from((0, 0, 1, 2)),
)


TINY = HeldState("flat", (HeldTensors(1, 1, 3, group=0), HeldTensors(1, 2, group=0, reached_bytes=2)))


@given(states, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(0, 40))
@example(TINY, 1, 1, 1, 1, 1)
def test_more_workers_never_need_more(held: HeldState, tp: int, ep: int, pp: int, cells: int, more: int) -> None:
    shape = MeshSettings(tp=tp, ep=ep, pp=pp)
    try:
        few = state_bytes(held, shape, cells * shape.cell)
    except UsageError:
        return
    # A rank that has the end of a flat has its padding beside the whole last tensor: less than two elements a rank.
    workers = (cells + more) * shape.cell
    ends = {(each.group, each.experts > 0, each.reached_bytes) for each in held.tensors if held.cut_by == "flat"}
    padding = sum(2 * workers * size for *_, size in ends)
    assert state_bytes(held, shape, workers) <= few + padding


def test_gradients_of_several_micro_batches_are_whole_until_the_last() -> None:
    one = HeldTensors(12, 10, data_bytes=12, group=0, summed_bytes=2, reduced_bytes=4)
    once, whole = 120 // 4 * 12, 120 // 4 * 8 + 120 * 2

    def held(**steps: int) -> HeldState:
        return HeldState("rows", (one,), **steps)

    assert state_bytes(held(passes=4), MeshSettings(), 4) == once
    assert state_bytes(held(passes=5), MeshSettings(), 4) == whole
    assert state_bytes(held(passes=2), MeshSettings(sp=2), 4) == once, (
        "all ranks of a sequence have a part of each pass"
    )
    assert state_bytes(held(passes=3), MeshSettings(sp=2), 4) == whole
    assert state_bytes(held(passes=9), MeshSettings(), 1) == 120 * 12, "what is reduced is larger"
    assert state_bytes(held(micro_steps=1, passes=9), MeshSettings(), 4) == once
    assert state_bytes(held(micro_steps=2), MeshSettings(), 4) == whole
    staged = HeldState("rows", (one._replace(layers=2),))
    assert state_bytes(staged, MeshSettings(pp=2), 8) == whole, "a pipeline reduces after all backward passes"
    known = KnownMemory(500, held(passes=4), (MeshMemory(4, {}, 10),))
    fewer = predict(known, MeshSettings(), {}, 3)
    assert fewer is not None
    assert fewer.peak_bytes == 120 // 3 * 8 + 120 * 2 + 10


@given(states, st.integers(1, 4), st.integers(1, 3), st.integers(1, 10))
def test_all_ranks_together_have_at_least_the_whole_and_the_fullest_at_most_that(
    held: HeldState, tp: int, ep: int, cells: int
) -> None:
    shape = MeshSettings(tp=tp, ep=ep)
    world_size = cells * shape.cell
    reached = held.cut_by == "flat"
    held = replace(held, passes=1, micro_steps=0)
    once = sum(each.rows * each.width * each.number * each.layers
               * (each.lane_bytes + each.data_bytes + each.reached_bytes * reached)
               for each in held.tensors)  # fmt: skip
    alone = state_bytes(held, MeshSettings(), 1)
    # A flat is padded to an even number of elements.
    assert once <= alone <= once + 12 * 12
    fullest = state_bytes(held, shape, world_size)
    assert fullest <= alone + 12 * 12
    assert fullest * world_size >= once


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 40))
def test_a_part_of_a_flat_reaches_little_more_than_is_counted(numels: list[int], ranks: int) -> None:
    layout = zero12_layout([[(str(number), numel) for number, numel in enumerate(numels)]], ranks)
    reached = max(sum(layout.numels[chunk.name] for chunk in rank.chunks) for rank in layout.ranks)
    held = HeldState("flat", tuple(HeldTensors(numel, 1, reached_bytes=1) for numel in numels))
    counted = state_bytes(held, MeshSettings(), ranks)
    padding = -sum(numels) % (2 * ranks)
    assert reached <= counted <= reached + sum(sorted(numels)[-2:]) + padding
    assert counted <= sum(numels) + padding


def test_what_each_axis_cuts() -> None:
    held = HeldState("elements", (HeldTensors(12, 10, 1, 2, 8, cut=0), HeldTensors(6, 5, 4, 0, 8, experts=2)), slices=2)
    assert state_bytes(held, MeshSettings(), 1) == 120 * 10 + 4 * 30 * 8
    assert state_bytes(held, MeshSettings(), 4) == 120 * 2 + 30 * 8 + 4 * 8 * 8, "parts are rounded up"
    assert state_bytes(held, MeshSettings(tp=2), 4) == 60 * 2 + 30 * 8 + 4 * 15 * 8
    assert state_bytes(held, MeshSettings(ep=4), 4) == 120 * 2 + 30 * 8 + 30 * 8, "one expert, on one rank"
    assert state_bytes(held, MeshSettings(sp=2), 4) == state_bytes(held, MeshSettings(), 4), "sequences share no state"
    assert state_bytes(replace(held, shard_workers=2), MeshSettings(), 4) == state_bytes(held, MeshSettings(), 2)


def test_of_a_pipeline_the_fullest_stage_counts_and_a_tied_layer_on_both_of_its_ends() -> None:
    ends, block = HeldTensors(40, 1, data_bytes=1, group=0, also=(3,)), HeldTensors(30, 1, data_bytes=1, group=0)
    held = HeldState("rows", (ends, block._replace(layer=1, layers=2)))
    assert state_bytes(held, MeshSettings(pp=1), 1) == 100
    assert state_bytes(held, MeshSettings(pp=2), 2) == 70
    assert state_bytes(held, MeshSettings(pp=4), 4) == 40
    with pytest.raises(UsageError, match="5 stages need 5 layers"):
        state_bytes(held, MeshSettings(pp=5), 5)


def test_a_thousand_layers_are_a_few_lines() -> None:
    whole = together(each._replace(layer=layer) for layer in range(1000) for each in model().tensors[1:])
    found = together(
        each._replace(layer=layer, layers=1) for layer in range(1, 13) for each in reversed(model().tensors[1:])
    )
    assert sorted(found) == sorted(model().tensors[1:])
    assert len(whole) < 200
    assert together(found) == found
    halves = [replace(model(), tensors=found[:2]), replace(model(), tensors=found[2:])]
    assert HeldState.of(halves).tensors == found


# --- predictions ---


def known(axes: dict[str, int], world_size: int, rest: int, limit: int = 10**6, held: HeldState | None = None) -> Any:
    return KnownMemory().measured(MeshMemory(world_size, axes, rest), limit, held or model())


def test_without_reports_nothing_is_predicted() -> None:
    assert predict(KnownMemory(), LAYERS, {"tp": 2}, 4) is None


@pytest.mark.parametrize("cut_by", EVERY)
def test_the_measured_mesh_is_predicted_as_it_was_measured(cut_by: CutBy) -> None:
    facts = known({"tp": 2}, 4, 1000, held=model(cut_by))
    need = predict(facts, LAYERS, {"tp": 2}, 4)
    assert need is not None
    assert (need.state_bytes, need.rest_bytes) == (state_bytes(model(cut_by), MeshSettings(tp=2), 4), 1000)
    assert facts.fitted(4, {"tp": 2})
    assert facts.fitted(6, {"tp": 2}), "more workers share more"
    assert not facts.fitted(2, {"tp": 2})


def test_the_rest_grows_by_old_slices_over_new_and_shrinks_by_nothing() -> None:
    assert growth({"tp": 4, "pp": 2, "ep": 2}, {"tp": 2, "pp": 4, "ep": 1}) == 4
    facts = known({"tp": 2}, 4, 1000)
    rest = {tp: need.rest_bytes for tp in (1, 2, 4) if (need := predict(facts, LAYERS, {"tp": tp}, 4))}
    assert rest == {1: 2000, 2: 1000, 4: 1000}


def test_of_several_meshes_the_same_axes_decide_else_the_one_that_promises_least() -> None:
    facts = known({"tp": 4}, 4, 500).measured(MeshMemory(4, {"tp": 2}, 900), 10**6, model())
    assert predict(facts, LAYERS, {"tp": 4}, 8).rest_bytes == 500  # type: ignore[union-attr]
    assert predict(facts, LAYERS, {"tp": 1}, 8).rest_bytes == 1800, "and not 2,000"  # type: ignore[union-attr]
    again = facts.measured(MeshMemory(8, {"tp": 2}, 950), 10**6, model())
    assert predict(again, LAYERS, {"tp": 2}, 2).rest_bytes == 950  # type: ignore[union-attr]


def test_what_lanes_would_cut_is_known_where_they_have_cut_it() -> None:
    whole = replace(model(), slices=1, tensors=tuple(each._replace(cut=-1) for each in model().tensors))
    facts = known({"tp": 1}, 4, 1000, held=whole)
    assert predict(facts, LAYERS, {"tp": 2}, 4) is None, "nobody knows how much would be cut"
    assert predict(facts, LAYERS, {"tp": 1}, 2) is not None
    cut = facts.measured(MeshMemory(4, {"tp": 2}, 1000), 10**6, model())
    after = cut.measured(MeshMemory(3, {"tp": 1}, 1000), 10**6, whole)
    assert after.held == model(), "and stays known"
    assert predict(after, LAYERS, {"tp": 4}, 4) is not None


def test_experts_that_nobody_has_shared_are_not_known() -> None:
    plain = replace(model(), tensors=tuple(each._replace(experts=0) for each in model().tensors))
    assert predict(known({"ep": 1}, 4, 0, held=plain), EXPERTS, {"ep": 2}, 4) is None
    assert predict(known({"ep": 2}, 4, 0), EXPERTS, {"ep": 4}, 4) is not None


def test_more_stages_than_layers_are_left_to_the_engine() -> None:
    few = replace(model(), tensors=model().tensors[:1])
    assert predict(known({"pp": 2}, 4, 0, held=few), STAGES, {"pp": 4}, 4) is None


@pytest.mark.parametrize(("settings", "axis"), [(LAYERS, "tp"), (EXPERTS, "ep"), (STAGES, "pp")])
def test_in_every_axis_more_workers_are_never_predicted_to_need_more(settings: MeshSettings, axis: str) -> None:
    for cut_by, of, size in product(EVERY, (1, 2, 4), (1, 2, 4)):
        facts = known({axis: of}, 4, 1000, held=model(cut_by))
        needs = [predict(facts, settings, {axis: size}, cells * size) for cells in range(1, 9)]
        peaks = [need.peak_bytes for need in needs if need is not None]
        assert len(peaks) == 8
        assert peaks == sorted(peaks, reverse=True)


def test_figures_are_said_in_gib() -> None:
    held = HeldState("whole", (HeldTensors(GIB, 1, lane_bytes=40),))
    need = predict(known({"tp": 1}, 2, 3 * GIB, 32 * GIB, held), LAYERS, {"tp": 1}, 1)
    assert str(need) == "43.0 of 32.0 GiB, 40.0 of it training state"
    assert need is not None
    assert not need.suffices


# --- reports ---


def told(rank: int, peak: int, state: int, held: HeldState | None = None, **more: Any) -> dict[str, Any]:
    return {
        "generation": 1, "rank": rank, "world_size": 3, "limit_bytes": 1000 - rank, "peak_bytes": peak,
        "state_bytes": state, "held": None if held is None else encode(held), **more,
    }  # fmt: skip


def test_reports_count_once_all_ranks_have_come() -> None:
    first = replace(model(), tensors=model().tensors[:2])
    rest = replace(model(), tensors=model().tensors[2:])
    reports = MemoryReports()
    assert reports.add(told(0, 700, 300, first)) is None
    assert reports.add(told(2, 650, 100, rest)) is None
    assert reports.add(told(2, 650, 100, rest)) is None, "again, after another controller has come"
    assert reports.add(told(1, 50, 100)) == (998, 550, HeldState.of([first, rest]))
    assert reports.add(told(0, 700, 300, first)) is None
    assert reports.add(told(1, 700, 300, generation=2)) is None
    assert reports.add(told(2, 700, 300, generation=2)) is None, "those of the generation before are gone"
