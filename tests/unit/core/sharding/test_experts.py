"""Two partitions in one engine: dense parameters over all ranks, experts over those with the same ones."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.mesh import Mesh
from elastic.core.sharding.experts import Place, held, neighbours
from elastic.core.sharding.layout import Layout, check_cover, check_rank
from elastic.core.sharding.reshard import plan_rank
from elastic.core.sharding.zero import Group, zero3_layout, zero12_layout

# (numels of one expert, or of a dense tensor; are they experts?)
GROUPS = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=4
)
# (ep, cells, neighbours with the same experts); the number of experts is a multiple of both sides' ep.
World = tuple[int, int, int]
WORLDS = st.tuples(st.sampled_from([1, 2, 3, 6]), st.integers(1, 3), st.integers(1, 2))
EXPERTS = 6


def cut12(group: Group, size: int, _: int) -> Layout:
    return zero12_layout([group], size)


def cut3(group: Group, size: int, rank: int) -> Layout:
    return zero3_layout([group], size, 30, only=rank)


def wholes(groups: list[tuple[list[int], bool]]) -> dict[str, int]:
    """Name -> elements of the whole tensor."""
    return {
        f"{number}.{at}": numel * (EXPERTS if experts else 1)
        for number, (numels, experts) in enumerate(groups)
        for at, numel in enumerate(numels)
    }


def layouts(groups: list[tuple[list[int], bool]], world: World, stage: int) -> Layout:
    ep, size = world[0], math.prod(world)
    numels = wholes(groups)
    own: list[tuple[Group, bool]] = [
        ([(f"{number}.{at}", numels[f"{number}.{at}"] // (ep if experts else 1)) for at in range(len(given))], experts)
        for number, (given, experts) in enumerate(groups)
    ]
    cut, buffer = (cut3, "sub") if stage == 3 else (cut12, "group")
    ranks = tuple(held(own, Place(rank, size, ep, beside=world[2]), cut, buffer) for rank in range(size))
    return Layout(numels, ranks)


@given(groups=GROUPS, world=WORLDS, stage=st.sampled_from([1, 3]))
def test_each_element_of_the_whole_is_held_once(groups: list[tuple[list[int], bool]], world: World, stage: int) -> None:
    layout = layouts(groups, world, stage)
    spans: dict[str, list[tuple[int, int, int]]] = {name: [] for name in layout.numels}
    for rank, own in enumerate(layout.ranks):
        check_rank(own)
        for chunk in own.chunks:
            spans[chunk.name].append((chunk.start, chunk.stop, rank))
    for name, numel in layout.numels.items():
        check_cover(name, numel, spans[name])


@given(groups=GROUPS, world=WORLDS)
def test_experts_that_are_tensors_by_themselves_are_held_once(
    groups: list[tuple[list[int], bool]], world: World
) -> None:
    ep, _, beside = world
    size = math.prod(world)
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for rank in range(size):
        place = Place(rank, size, ep, True, beside)
        share = range(place.share * EXPERTS // ep, (place.share + 1) * EXPERTS // ep)
        own: list[tuple[Group, bool]] = [
            ([(f"{n}.{at}.{each}", numel) for each in (share if experts else [0]) for at, numel in enumerate(given)],
             experts)
            for n, (given, experts) in enumerate(groups)
        ]  # fmt: skip
        layout = held(own, place, cut12, "group")
        check_rank(layout)
        for chunk in layout.chunks:
            spans.setdefault(chunk.name, []).append((chunk.start, chunk.stop, rank))
    for number, (numels, experts) in enumerate(groups):
        for at, numel in enumerate(numels):
            for each in range(EXPERTS if experts else 1):
                check_cover("", numel, spans.pop(f"{number}.{at}.{each}"))
    assert not spans


@given(groups=GROUPS, before=WORLDS, after=WORLDS, stages=st.tuples(st.sampled_from([1, 3]), st.sampled_from([1, 3])))
def test_a_plan_between_any_two_shares_reads_each_element_from_where_it_is(
    groups: list[tuple[list[int], bool]], before: World, after: World, stages: tuple[int, int]
) -> None:
    source, target = layouts(groups, before, stages[0]), layouts(groups, after, stages[1])
    held_there = [
        {(c.buffer, c.offset + at): (c.name, c.start + at) for c in own.chunks for at in range(c.numel)}
        for own in source.ranks
    ]
    for own in target.ranks:
        wanted = {(c.buffer, c.offset + at): (c.name, c.start + at) for c in own.chunks for at in range(c.numel)}
        read = {
            (item.target_buffer, item.target_offset + at): held_there[item.source_rank][
                item.source_buffer, item.source_offset + at
            ]
            for item in plan_rank(source.ranks, own)
            for at in range(item.numel)
        }
        assert read == wanted


@given(groups=GROUPS, size=st.integers(1, 6), stage=st.sampled_from([1, 3]))
def test_without_experts_it_is_the_layout_of_zero(groups: list[tuple[list[int], bool]], size: int, stage: int) -> None:
    dense = [(numels, False) for numels, _ in groups]
    numels = wholes(dense)
    named = [[(f"{n}.{at}", numels[f"{n}.{at}"]) for at in range(len(given))] for n, (given, _) in enumerate(dense)]
    pure = zero3_layout(named, size, 30) if stage == 3 else zero12_layout(named, size)
    assert layouts(dense, (1, size, 1), stage).ranks == pure.ranks


def test_the_ranks_with_the_same_experts_are_those_that_a_mesh_says() -> None:
    mesh = Mesh.of(24, sp=2, ep=3)
    for rank in range(24):
        place = Place(rank, 24, 3, beside=2)
        alike = [other for other in range(24) if mesh.expert(other) == mesh.expert(rank)]
        assert (place.share, place.alike, neighbours(alike)) == (mesh.expert(rank), tuple(alike), 2)
        assert place.among(True) == (alike.index(rank), 8)
    assert (Place(1, 4).alike, neighbours([3, 5]), neighbours([1, 2])) == (None, 1, 2)
