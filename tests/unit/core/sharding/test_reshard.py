from __future__ import annotations

import random
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, Layout, RankLayout
from elastic.core.sharding.reshard import ReadItem, SourceIndex, plan_rank
from elastic.core.sharding.zero import owner_layout, replicated_layout, zero3_layout, zero12_layout

PADDING = None
Values = list[dict[str, list[Any]]]


def fill(layout: Layout) -> Values:
    """Every element is its own name: (parameter, index). Padding is None."""
    ranks = []
    for rank in layout.ranks:
        buffers: dict[str, list[Any]] = {name: [PADDING] * length for name, length in rank.buffers.items()}
        for chunk in rank.chunks:
            for index in range(chunk.numel):
                buffers[chunk.buffer][chunk.offset + index] = (chunk.name, chunk.start + index)
        ranks.append(buffers)
    return ranks


def move(values: Values, source: Layout, target: Layout) -> Values:
    index = SourceIndex(source.ranks)
    moved: Values = []
    for number, rank in enumerate(target.ranks):
        buffers: dict[str, list[Any]] = {name: [PADDING] * length for name, length in rank.buffers.items()}
        written = 0
        for item in index.plan(rank, spread=number):
            for step in range(item.numel):
                assert buffers[item.target_buffer][item.target_offset + step] is PADDING, "an element was copied twice"
                buffers[item.target_buffer][item.target_offset + step] = values[item.source_rank][item.source_buffer][
                    item.source_offset + step
                ]
            written += item.numel
        assert written == sum(chunk.numel for chunk in rank.chunks), "elements read differ from elements needed"
        moved.append(buffers)
    return moved


@st.composite
def cut_layouts(draw: st.DrawFn, numels: dict[str, int], replicas: bool = False) -> Layout:
    """Parameters cut anywhere, dealt to any ranks, in any order, with gaps between them and several buffers."""
    world = draw(st.integers(1, 6))
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(world)]
    for name, numel in numels.items():
        # Replicas are cut by themselves, so that chunks also overlap in part.
        for _ in range(draw(st.integers(1, 3)) if replicas else 1):
            cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
            for start, stop in pairwise(cuts):
                held[draw(st.integers(0, world - 1))].append((name, start, stop))
    layouts = []
    for own in held:
        order = draw(st.permutations(own))
        ends = {"x": 0, "y": 0}
        chunks = []
        for name, start, stop in order:
            buffer = draw(st.sampled_from("xy"))
            offset = ends[buffer] + draw(st.integers(0, 2))
            chunks.append(Chunk(name, start, stop - start, buffer, offset))
            ends[buffer] = offset + stop - start
        layouts.append(RankLayout(tuple(chunks), ends))
    return Layout(numels, tuple(layouts))


NUMELS = st.dictionaries(st.sampled_from(["a", "b", "layers.2", "layers.10"]), st.integers(1, 30), min_size=1)


@given(data=st.data(), numels=NUMELS)
def test_any_layout_becomes_any_other(data: st.DataObject, numels: dict[str, int]) -> None:
    source = data.draw(cut_layouts(numels, replicas=True))
    target = data.draw(cut_layouts(numels, replicas=True))
    assert move(fill(source), source, target) == fill(target)


@given(data=st.data(), numels=NUMELS)
def test_rows_of_a_parameter_are_few_items(data: st.DataObject, numels: dict[str, int]) -> None:
    source = data.draw(cut_layouts(numels, replicas=True))
    name = data.draw(st.sampled_from(sorted(numels)))
    width = data.draw(st.integers(1, numels[name]))
    stride = width + data.draw(st.integers(1, 4))
    start = data.draw(st.integers(0, numels[name] - width))
    rows = 1 + data.draw(st.integers(0, (numels[name] - width - start) // stride))
    values, found = fill(source), [PADDING] * (3 + rows * width)
    items = list(SourceIndex(source.ranks).plan_rows(Chunk(name, start, width, "own", 3), rows, stride, spread=1))
    for item in items:
        held = values[item.source_rank][item.source_buffer]
        for row in range(item.rows):
            begin, place = item.source_offset + row * item.source_stride, item.target_offset + row * item.numel
            assert found[place : place + item.numel] == [PADDING] * item.numel, "an element was copied twice"
            found[place : place + item.numel] = held[begin : begin + item.numel]
    assert found[:3] == [PADDING] * 3
    assert found[3:] == [(name, start + row * stride + at) for row in range(rows) for at in range(width)]
    # Where a source ends, a row may be cut: before it whole rows, the cut one of two parts or more, and whole rows.
    sources = sum(len([chunk for chunk in rank.chunks if chunk.name == name]) for rank in source.ranks)
    assert len(items) <= 3 * sources


@given(data=st.data(), numels=NUMELS)
def test_there_and_back_is_the_identity(data: st.DataObject, numels: dict[str, int]) -> None:
    here, there = data.draw(cut_layouts(numels)), data.draw(cut_layouts(numels))
    values = fill(here)
    assert move(move(values, here, there), there, here) == values


GROUPS = [
    [("emb.weight", 96), ("one", 1), ("three", 3), ("layers.2.w", 49), ("layers.10.w", 49), ("seven", 7)],
    [("bias", 5), ("prime", 31)],
    [("lonely", 1)],
]


def zero_layouts(world: int) -> dict[str, Layout]:
    return {
        "zero12": zero12_layout(GROUPS, world),
        "round robin": zero12_layout(GROUPS, world, round_robin=True, parameter_alignment_elements=4),
        "zero3": zero3_layout(GROUPS, world),
        "zero3, small sub-groups": zero3_layout(GROUPS, world, 10),
        "replicated": replicated_layout([tensor for group in GROUPS for tensor in group], world),
        "dealt": owner_layout([tensor for group in GROUPS for tensor in group], world),
    }


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 6), (6, 4), (7, 5), (12, 5), (5, 64)]
)
def test_zero_layouts_at_other_world_sizes(before: int, after: int) -> None:
    for source in zero_layouts(before).values():
        for target in zero_layouts(after).values():
            assert move(fill(source), source, target) == fill(target)


def test_nothing_to_do_is_one_copy_per_buffer() -> None:
    layout = zero12_layout([[("a", 10), ("b", 6)]], 2)
    assert plan_rank(layout.ranks, layout.ranks[1]) == (ReadItem(1, "group0", 0, "group0", 0, 8, "a"),)


def test_copies_are_merged_only_where_both_sides_touch() -> None:
    source = [RankLayout((Chunk("a", 0, 4, "x", 0), Chunk("b", 0, 4, "x", 4), Chunk("c", 0, 4, "x", 9)), {"x": 13})]
    target = RankLayout((Chunk("a", 0, 4, "y", 0), Chunk("b", 0, 4, "y", 4), Chunk("c", 0, 4, "y", 8)), {"y": 12})
    assert plan_rank(source, target) == (ReadItem(0, "x", 0, "y", 0, 8, "a"), ReadItem(0, "x", 9, "y", 8, 4, "c"))


def test_replicas_share_the_work() -> None:
    tensors = [(f"p{number}", 10) for number in range(64)]
    source = replicated_layout(tensors, 4)
    target = replicated_layout(tensors, 1).ranks[0]
    chosen = [item.source_rank for item in plan_rank(source.ranks, target)]
    assert {rank: chosen.count(rank) for rank in range(4)}.keys() == {0, 1, 2, 3}
    assert min(chosen.count(rank) for rank in range(4)) >= 8
    turned = [item.source_rank for item in plan_rank(source.ranks, target, spread=1)]
    assert turned == [(rank + 1) % 4 for rank in chosen]


def test_a_hole_is_named() -> None:
    source = zero12_layout([[("a", 10), ("b", 10)]], 5).ranks
    target = zero12_layout([[("a", 10), ("b", 10)]], 2).ranks[0]
    with pytest.raises(IntegrityError, match=r"elements \[4, 8\) of parameter 'a'"):
        plan_rank([source[0], RankLayout(), *source[2:]], target)
    with pytest.raises(IntegrityError, match=r"elements \[8, 10\) of parameter 'a'"):
        plan_rank(source[:2], target)
    with pytest.raises(IntegrityError, match=r"elements \[0, 3\) of parameter 'new'"):
        plan_rank(source, RankLayout((Chunk("new", 0, 3, "x", 0),), {"x": 3}))


def lines_run(source: Layout, target: Layout) -> int:
    """Lines of reshard.py run to plan for every rank: a count of operations that does not depend on the machine."""
    count = 0

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += 1
        return local

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return local if frame.f_code.co_filename.endswith("reshard.py") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        index = SourceIndex(source.ranks)
        for rank in target.ranks:
            index.plan(rank)
    finally:
        sys.settrace(before)
    return count


def test_cost_is_linear_in_slices() -> None:
    chance = random.Random(0)
    for layout in (zero12_layout, zero3_layout):
        costs = []
        for parameters, world in ((10, 8), (20, 16), (40, 32)):
            groups = [[(f"p{number}", chance.randint(500, 1500)) for number in range(parameters)]]
            source, target = layout(groups, world), layout(groups, world - 3)
            slices = sum(len(rank.chunks) for side in (source, target) for rank in side.ranks)
            costs.append(lines_run(source, target) / slices)
        assert max(costs) < 1.3 * min(costs), costs
