"""Which part of a whole tensor each lane (`core.mesh`) holds, and where the elements of an interval of it lie in them.

A parameter of a layer that ranks share is cut along one dimension: a lane has some ranges of indices of it, one after
another in its slice, and all of the other dimensions. Slices are numbered row-major each by itself, as their shards
are, so that a contiguous part of the whole lies in a slice as rows of some elements: a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.errors import IntegrityError

# Indices [start, stop) along the dimension that is cut.
Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """`ranges[lane]` are the indices that a lane has along `dim` of the whole tensor, of `shape`: in the order in which
    they lie in its slice."""

    dim: int
    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def evenly(cls, dim: int, shape: Sequence[int], lanes: int) -> Cut:
        """Shares of one size, which `lanes` divides."""
        size = shape[dim] // lanes
        return cls(dim, tuple(shape), tuple(((lane * size, (lane + 1) * size),) for lane in range(lanes)))

    def slice_shape(self, lane: int) -> tuple[int, ...]:
        """Of what `lane` has."""
        return (*self.shape[: self.dim], _length(self.ranges[lane]), *self.shape[self.dim + 1 :])

    def problem(self) -> str | None:
        """Why the lanes' slices are not one whole tensor, in words; None where they are."""
        if not 0 <= self.dim < len(self.shape):
            return f"a tensor of shape {list(self.shape)} has no dimension {self.dim}"
        reached, size = 0, self.shape[self.dim]
        for start, stop in sorted(found for own in self.ranges for found in own):
            if start != reached or stop <= start:
                where = f"index {min(start, reached)} of dimension {self.dim}"
                return f"{where} is in no slice" if start > reached else f"{where} is in two slices"
            reached = stop
        return None if reached == size else f"the slices have {reached} of {size} indices of dimension {self.dim}"


def parts_of(before: int, widths: Sequence[Sequence[int]], after: int = 1) -> tuple[tuple[Range, ...], ...]:
    """By lane the ranges of a dimension that is seen as `before` blocks of sub-parameters one after another, of which
    each is cut by itself: `widths[sub-parameter][lane]`, each of `after` indices."""
    block = sum(map(sum, widths))
    firsts = [sum(map(sum, widths[:number])) for number in range(len(widths))]

    def ranges(lane: int) -> Iterator[Range]:
        for number in range(before):
            for first, own in zip(firsts, widths, strict=True):
                start = number * block + first + sum(own[:lane])
                yield start * after, (start + own[lane]) * after

    return tuple(_joined(ranges(lane)) for lane in range(len(widths[0])))


@dataclass(frozen=True)
class Box:
    """`rows` times `width` elements of a lane's slice: from element `source` on, `source_stride` apart, and in the
    interval of the whole tensor that is asked for from `target` on, `target_stride` apart."""

    lane: int
    source: int
    source_stride: int
    target: int
    target_stride: int
    rows: int
    width: int

    @property
    def span(self) -> int:
        """How many elements of the slice there are from the first of the box to its last."""
        return (self.rows - 1) * self.source_stride + self.width

    def pieces(self, numel: int) -> Iterator[Box]:
        """The same elements in boxes of at most so many."""
        rows, width = max(1, numel // self.width), min(numel, self.width)
        for row in range(0, self.rows, rows):
            source, target = self.source + row * self.source_stride, self.target + row * self.target_stride
            for column in range(0, self.width, width):
                yield replace(
                    self,
                    source=source + column,
                    target=target + column,
                    rows=min(rows, self.rows - row),
                    width=min(width, self.width - column),
                )


def in_whole(cut: Cut | None, lane: int, start: int, stop: int) -> list[Box]:
    """Where the elements [start, stop) of what `lane` has lie in the whole tensor. None: it has all of it."""
    if cut is None:
        return [Box(0, start, stop - start, 0, stop - start, 1, stop - start)]
    return recut(uncut(cut.dim, cut.shape), cut, lane, start, stop)


def boxes(cut: Cut, start: int, stop: int) -> list[Box]:
    """Where the elements [start, stop) of the flattened whole tensor lie: each is in exactly one box."""
    return recut(cut, uncut(cut.dim, cut.shape), 0, start, stop)


def uncut(dim: int, shape: Sequence[int]) -> Cut:
    """A tensor that one lane has whole, as a cut along any dimension."""
    return Cut(dim, tuple(shape), (((0, shape[dim]),),))


def recut(source: Cut, target: Cut, lane: int, start: int, stop: int) -> list[Box]:
    """Where the elements [start, stop) of the slice that `lane` has by `target` lie in slices by `source` of the same
    tensor: each is in exactly one box, whose target is counted from `start`.

    Along one dimension there are some boxes for each pair of ranges; where the dimensions differ, for each row.
    """
    after = math.prod(target.shape[target.dim + 1 :])
    width, own = target.shape[target.dim] * after, _length(target.ranges[lane]) * after
    found: list[Box] = []
    for row, rows, first, last in _blocks(start, stop, own) if own else ():
        for column, low, high in _columns(target.ranges[lane], after, first, last):
            place = row * own + column - start
            if source.dim == target.dim:
                found += _within(source, row, rows, low, high, place, own)
                continue
            for number in range(rows):
                begin = (row + number) * width
                for box in boxes(source, begin + low, begin + high):
                    found.append(replace(box, target=place + number * own + box.target))
    return found


def _within(source: Cut, row: int, rows: int, first: int, last: int, place: int, stride: int) -> Iterator[Box]:
    """The columns [first, last) of `rows` rows from `row` on, in the lanes' slices; in the target from `place` on."""
    after = math.prod(source.shape[source.dim + 1 :])
    for lane, ranges in enumerate(source.ranges):
        width = _length(ranges) * after
        for column, low, high in _columns(ranges, after, 0, width):
            begin, end = max(low, first), min(high, last)
            if begin < end:
                at = row * width + column + begin - low
                yield Box(lane, at, width, place + begin - first, stride, rows, end - begin)


def _columns(ranges: Sequence[Range], after: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Of the columns [first, last) of a slice of these ranges, each of `after` elements, those that lie together:
    (column in the slice, the columns of the whole tensor from, to)."""
    place = 0
    for low, high in ((low * after, high * after) for low, high in ranges):
        begin, end = max(place, first), min(place + high - low, last)
        if begin < end:
            yield begin, low + begin - place, low + end - place
        place += high - low


def to_json(cuts: Mapping[str, Cut | str]) -> dict[str, Any]:
    """Of each parameter its cut, or why that is not known. Equal ones, of one layer after another, are written once."""
    kinds: dict[Cut, int] = {}
    names = {name: cut if isinstance(cut, str) else kinds.setdefault(cut, len(kinds)) for name, cut in cuts.items()}
    listed = [[cut.dim, list(cut.shape), [[list(found) for found in own] for own in cut.ranges]] for cut in kinds]
    return {"kinds": listed, "names": names}


def union(records: Sequence[Any]) -> dict[str, Any]:
    """One record of several, of different parameters."""
    return to_json({name: cut for record in records for name, cut in from_json(record).items()})


def from_json(data: Any, lanes: int | None = None) -> dict[str, Cut | str]:
    """Inverse of `to_json`. Raises IntegrityError for anything that it would not have written, of so many lanes where
    their number is known."""
    try:
        kinds = [
            Cut(dim, tuple(shape), tuple(tuple((start, stop) for start, stop in own) for own in ranges))
            for dim, shape, ranges in data["kinds"]
        ]
        known = dict(enumerate(kinds))
        found = {name: kind if isinstance(kind, str) else known[kind] for name, kind in data["names"].items()}
        wrong = next((cut for cut in kinds if cut.problem() or len(cut.ranges) != (lanes or len(cut.ranges))), None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"the checkpoint's record of slices cannot be read: {error!r}") from error
    if wrong is not None:
        said = wrong.problem() or f"it is of {len(wrong.ranges)} lanes, not of {lanes}"
        raise IntegrityError(f"the checkpoint's record of slices cannot be right: {said}")
    return found


def _blocks(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """An interval as at most three blocks of (first row, rows, first column, column behind the last)."""
    row, column = divmod(start, width)
    if column or stop - start < width:
        last = min(width, column + stop - start)
        if column < last:
            yield row, 1, column, last
        start += last - column
    if rows := (stop - start) // width:
        yield start // width, rows, 0, width
        start += rows * width
    if start < stop:
        yield start // width, 1, 0, stop - start


def _length(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _joined(ranges: Iterator[Range]) -> tuple[Range, ...]:
    """Without empty ones, those that follow each other as one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
