from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import IntegrityError, UsageError
from elastic.core.sharding.layout import Chunk, Layout, RankLayout, check_cover, check_rank, merged
from elastic.core.sharding.zero import owner_layout, replicated_layout, zero3_layout, zero12_layout

GROUPS = st.lists(st.lists(st.integers(0, 60), max_size=8), max_size=4).map(
    lambda groups: [[(f"g{g}.p{p}", numel) for p, numel in enumerate(group)] for g, group in enumerate(groups)]
)


def check(layout: Layout) -> None:
    """Every element of every parameter exactly once, inside the buffers, and none of them twice in a buffer."""
    for rank in layout.ranks:
        check_rank(rank)
    for name, numel in layout.numels.items():
        spans = [(p.start, p.stop, r) for r, rank in enumerate(layout.ranks) for p in rank.chunks if p.name == name]
        check_cover(name, numel, spans)
    assert {p.name for rank in layout.ranks for p in rank.chunks} == set(layout.numels)


@given(groups=GROUPS, world=st.integers(1, 13), round_robin=st.booleans(), alignment=st.sampled_from([1, 4, 8]))
def test_zero12_holds_everything_once(groups, world: int, round_robin: bool, alignment: int) -> None:
    layout = zero12_layout(groups, world, round_robin=round_robin, parameter_alignment_elements=alignment)
    check(layout)
    kept = [[numel for _, numel in group if numel] for group in groups]
    kept = [group for group in kept if group]
    for rank in layout.ranks:
        assert list(rank.buffers) == [f"group{number}" for number in range(len(kept))]
        assert all(length % 2 == 0 for length in rank.buffers.values())
    if alignment == 1:
        sizes = [math.ceil(sum(group) / (2 * world)) * 2 for group in kept]
        assert list(layout.ranks[0].buffers.values()) == sizes


@given(groups=GROUPS, world=st.integers(1, 13), size=st.integers(1, 80))
def test_zero3_holds_everything_once(groups, world: int, size: int) -> None:
    layout = zero3_layout(groups, world, size)
    check(layout)
    for rank in layout.ranks:
        assert rank.buffers == layout.ranks[0].buffers
    for number in range(world):
        alone = zero3_layout(groups, world, size, only=number)
        assert alone.ranks[number] == layout.ranks[number]
        assert not any(rank.chunks for other, rank in enumerate(alone.ranks) if other != number)
    by_name = {p.name: p for p in layout.ranks[0].chunks}
    for number, rank in enumerate(layout.ranks):
        for chunk in rank.chunks:
            # On every rank a parameter's part lies at the same place, as long as it has one.
            assert (chunk.buffer, chunk.offset) == (by_name[chunk.name].buffer, by_name[chunk.name].offset)
            assert chunk.start == number * by_name[chunk.name].numel


@given(tensors=st.lists(st.integers(0, 50), max_size=12), world=st.integers(1, 7))
def test_replicated_state_is_everywhere_and_dealt_once(tensors: list[int], world: int) -> None:
    named = [(f"t{number}", numel) for number, numel in enumerate(tensors)]
    replicated, dealt = replicated_layout(named, world), owner_layout(named, world)
    check(dealt)
    full = {name: numel for name, numel in named if numel}
    assert all(rank.buffers == full for rank in replicated.ranks)
    loads = [sum(rank.buffers.values()) for rank in dealt.ranks]
    # Graham's bound for dealing the largest first.
    assert max(loads) - min(loads) <= max(tensors, default=0)
    assert dealt == owner_layout(named, world)


def test_zero12_by_hand() -> None:
    # 7 + 5 = 12 elements at world size 5: padded to 20, so 4 each; the last two ranks hold padding only.
    layout = zero12_layout([[("a", 7), ("b", 5)]], 5)
    assert [rank.buffers for rank in layout.ranks] == [{"group0": 4}] * 5
    assert [rank.chunks for rank in layout.ranks] == [
        (Chunk("a", 0, 4, "group0", 0),),
        (Chunk("a", 4, 3, "group0", 0), Chunk("b", 0, 1, "group0", 3)),
        (Chunk("b", 1, 4, "group0", 0),),
        (),
        (),
    ]


def test_zero12_round_robin_order_depends_on_the_world_size() -> None:
    group = [[(name, 2) for name in "abcde"]]
    order = [p.name for rank in zero12_layout(group, 2, round_robin=True).ranks for p in rank.chunks]
    assert order == ["a", "c", "e", "b", "d"]
    order = [p.name for rank in zero12_layout(group, 3, round_robin=True).ranks for p in rank.chunks]
    assert order == ["a", "d", "b", "e", "c"]


def test_zero12_alignment_pads_between_parameters_but_not_after_the_last() -> None:
    layout = zero12_layout([[("a", 3), ("b", 5), ("c", 1)]], 1, parameter_alignment_elements=4)
    assert [(p.name, p.offset) for p in layout.ranks[0].chunks] == [("a", 0), ("b", 4), ("c", 12)]
    assert layout.ranks[0].buffers == {"group0": 14}


def test_zero3_by_hand() -> None:
    # Partitioned sizes at world size 4: a 2, b 1, c 3. A sub-group closes as soon as it has 3.
    layout = zero3_layout([[("a", 7), ("b", 1), ("c", 9)]], 4, sub_group_size=3)
    assert layout.ranks[0].buffers == {"sub0": 3, "sub1": 3}
    assert layout.ranks[0].chunks == (
        Chunk("a", 0, 2, "sub0", 0),
        Chunk("b", 0, 1, "sub0", 2),
        Chunk("c", 0, 3, "sub1", 0),
    )
    assert layout.ranks[3].chunks == (Chunk("a", 6, 1, "sub0", 0),)


def test_empty_groups_are_not_numbered() -> None:
    groups = [[], [("a", 4)], [("b", 0)], [("c", 2)]]
    assert list(zero12_layout(groups, 1).ranks[0].buffers) == ["group0", "group1"]
    assert list(zero3_layout(groups, 1).ranks[0].buffers) == ["sub0", "sub1"]
    assert zero12_layout([], 3).ranks == (RankLayout(),) * 3


def test_a_thousand_ranks() -> None:
    groups = [[(f"p{number}", 1 + number * 37) for number in range(40)]]
    check(zero12_layout(groups, 1000))
    check(zero3_layout(groups, 1000, 5))


def test_what_cannot_be_laid_out() -> None:
    with pytest.raises(UsageError, match="world_size"):
        zero12_layout([[("a", 1)]], 0)
    with pytest.raises(UsageError, match="'a' is given to the optimizer twice"):
        zero3_layout([[("a", 1)], [("a", 1)]], 2)


def test_merged_refuses_one_name_for_two_buffers() -> None:
    one, two = zero12_layout([[("a", 4)]], 1).ranks[0], replicated_layout([("frozen", 3)], 1).ranks[0]
    both = merged(one, two)
    assert both.buffers == {"group0": 4, "frozen": 3}
    assert both.chunks == one.chunks + two.chunks
    with pytest.raises(IntegrityError, match="'group0'"):
        merged(one, replicated_layout([("group0", 3)], 1).ranks[0])


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk("a", 0, 4, "x", 0)], "does not exist"),
        ([Chunk("a", 0, 9, "b", 0)], "does not fit"),
        ([Chunk("a", 0, 0, "b", 0)], "does not fit"),
        ([Chunk("a", -1, 2, "b", 0)], "does not fit"),
        ([Chunk("a", 0, 4, "b", 0), Chunk("c", 0, 4, "b", 3)], "overlaps"),
    ],
)
def test_check_rank_finds(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        check_rank(RankLayout(tuple(chunks), {"b": 8}))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 4, 0), (5, 9, 1)], r"no rank holds elements \[4, 5\)"),
        ([(0, 5, 0), (4, 9, 1)], "ranks 0 and 1 both hold elements from 4 on"),
        ([(0, 8, 0)], r"no rank holds elements \[8, 9\)"),
        ([(0, 10, 0)], r"the model does not have elements \[9, 10\)"),
        ([], r"no rank holds elements \[0, 9\)"),
    ],
)
def test_check_cover_finds(spans: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        check_cover("w", 9, spans)
