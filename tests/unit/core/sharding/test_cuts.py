"""Slices of a whole tensor: which elements of it are where in them, against numpy."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import IntegrityError
from elastic.core.sharding.cuts import Box, Cut, boxes, from_json, parts_of, recut, to_json, uncut


def slice_of(whole: Any, cut: Cut, lane: int) -> Any:
    """By indices, flattened."""
    indices = [index for start, stop in cut.ranges[lane] for index in range(start, stop)]
    return np.take(whole, np.array(indices, dtype=int), axis=cut.dim).reshape(-1)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...] = ()) -> Cut:
    """Any lanes: of several ranges in any order, of unequal sizes, of nothing."""
    shape = shape or draw(shapes)
    dim, lanes = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    edges = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=5))})
    pieces = draw(st.permutations(list(pairwise(edges))))
    owners = [draw(st.integers(0, lanes - 1)) for _ in pieces]
    return Cut(dim, shape, tuple(tuple(p for p, o in zip(pieces, owners, strict=True) if o == n) for n in range(lanes)))


def filled(found: list[Box], slices: list[Any], numel: int) -> Any:
    """An interval of so many elements, by way of the boxes; every element once."""
    target, times = np.full(numel, -1), np.zeros(numel, dtype=int)
    for box in found:
        assert box.span <= slices[box.lane].size - box.source
        for row in range(box.rows):
            source, there = box.source + row * box.source_stride, box.target + row * box.target_stride
            target[there : there + box.width] = slices[box.lane][source : source + box.width]
            times[there : there + box.width] += 1
    assert (times == 1).all()
    return target


@given(cuts(), st.data())
def test_any_interval_of_the_whole_is_put_together_of_the_slices(cut: Cut, data: st.DataObject) -> None:
    assert cut.problem() is None
    numel = math.prod(cut.shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = np.arange(numel).reshape(cut.shape)
    slices = [slice_of(whole, cut, lane) for lane in range(len(cut.ranges))]
    assert [own.size for own in slices] == [math.prod(cut.slice_shape(lane)) for lane in range(len(cut.ranges))]
    found = boxes(cut, start, stop)
    assert (filled(found, slices, stop - start) == np.arange(start, stop)).all()
    assert len(found) <= 3 * sum(map(len, cut.ranges))


@given(shapes, st.data())
def test_any_interval_of_a_slice_is_put_together_of_other_slices(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Cut along the same dimension or another one, or not at all on either side."""
    source, target = (
        data.draw(cuts(shape) | st.integers(0, len(shape) - 1).map(lambda n: uncut(n, shape))) for _ in "ab"
    )
    whole = np.arange(math.prod(shape)).reshape(shape)
    slices = [slice_of(whole, source, lane) for lane in range(len(source.ranges))]
    lane = data.draw(st.integers(0, len(target.ranges) - 1))
    own = slice_of(whole, target, lane)
    start = data.draw(st.integers(0, own.size))
    stop = data.draw(st.integers(start, own.size))
    found = recut(source, target, lane, start, stop)
    assert (filled(found, slices, stop - start) == own[start:stop]).all()
    if source.dim == target.dim:
        assert len(found) <= 3 * sum(map(len, source.ranges)) * len(target.ranges[lane])


@given(shapes, st.data())
def test_all_lanes_together_read_every_stored_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    source, target = data.draw(cuts(shape)), data.draw(cuts(shape))
    times = [np.zeros(math.prod(source.slice_shape(lane)), dtype=int) for lane in range(len(source.ranges))]
    for lane in range(len(target.ranges)):
        for box in recut(source, target, lane, 0, math.prod(target.slice_shape(lane))):
            for row in range(box.rows):
                at = box.source + row * box.source_stride
                times[box.lane][at : at + box.width] += 1
    assert all((own == 1).all() for own in times)


@given(cuts())
def test_a_range_that_is_left_out_or_doubled_is_found(cut: Cut) -> None:
    owner = next(lane for lane, ranges in enumerate(cut.ranges) if ranges)
    less = [ranges[1:] if lane == owner else ranges for lane, ranges in enumerate(cut.ranges)]
    assert Cut(cut.dim, cut.shape, tuple(less)).problem() is not None
    more = [*cut.ranges, cut.ranges[owner][:1]]
    assert "two slices" in (Cut(cut.dim, cut.shape, tuple(more)).problem() or "")


def test_a_dimension_that_is_not_there_is_found() -> None:
    assert Cut(2, (3, 4), (((0, 3),),)).problem() == "a tensor of shape [3, 4] has no dimension 2"


def test_even_shares() -> None:
    assert Cut.evenly(1, (3, 4), 2) == Cut(1, (3, 4), (((0, 2),), ((2, 4),)))
    assert boxes(Cut.evenly(1, (3, 4), 2), 0, 12) == [Box(0, 0, 2, 0, 4, 3, 2), Box(1, 0, 2, 2, 4, 3, 2)]


@given(
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_sub_parameters_are_cut_each_by_itself(before: int, widths: list[list[int]], after: int) -> None:
    """As torch splits and joins a view of [before, sub-parameters, after]."""
    block = sum(map(sum, widths))
    ids = np.arange(before * block * after).reshape(before, block, after)
    for lane, found in enumerate(parts_of(before, widths, after)):
        subs = np.split(ids, np.cumsum([sum(own) for own in widths])[:-1], axis=1)
        mine = [np.split(sub, np.cumsum(own)[:-1], axis=1)[lane] for sub, own in zip(subs, widths, strict=True)]
        expected = np.concatenate(mine, axis=1).reshape(-1).tolist()
        assert [index for start, stop in found for index in range(start, stop)] == expected


@given(st.dictionaries(st.text(max_size=3), cuts()))
def test_the_record_survives_json(by_name: dict[str, Cut]) -> None:
    for lanes in {len(cut.ranges) for cut in by_name.values()}:
        own: dict[str, Cut | str] = {name: cut for name, cut in by_name.items() if len(cut.ranges) == lanes}
        own["odd"] = "for a reason"
        assert from_json(json.loads(json.dumps(to_json(own))), lanes) == own


def test_equal_cuts_are_written_once() -> None:
    cut = Cut.evenly(0, (4, 4), 2)
    assert len(to_json({"a": cut, "b": Cut.evenly(0, (4, 4), 2), "c": Cut.evenly(1, (4, 4), 2)})["kinds"]) == 2


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kinds": [], "names": {"a": 0}},
        {"kinds": [[0, [4], [[[0, 2]], [[1, 4]]]]], "names": {"a": 0}},
        {"kinds": [[0, [4], [[[0, 4]]]]], "names": {"a": 0}},
        {"kinds": [[0, "4", None]], "names": {}},
        {"kinds": [[0, [4], [[[0, 2, 3]], [[2, 4]]]]], "names": {}},
        [],
    ],
)
def test_a_record_that_nobody_has_written_is_refused(data: Any) -> None:
    with pytest.raises(IntegrityError, match="the checkpoint's record of slices"):
        from_json(data, 2)
