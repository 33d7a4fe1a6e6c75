"""The plan that turns one layout into another: read items as plain data, made before a byte moves.

Per parameter this is an intersection of two lists of intervals. Sources are indexed once by name, and each item finds
its source by bisection, so the cost is linear (up to that logarithm) in the chunks read plus the items made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, le
from typing import Any
from zlib import crc32

from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, RankLayout


@dataclass(frozen=True)
class ReadItem:
    """Read `numel` elements from a source rank's buffer into a buffer of the target rank, or `rows` times so many: each
    row begins `source_stride` behind the one before, and follows it in the target. Counts are elements.

    `name` is the parameter that the range begins with: a merged item may continue into the parameters that follow it in
    both buffers. The same item holds for every kind of tensor that both buffers exist for.
    """

    source_rank: int
    source_buffer: str
    source_offset: int
    target_buffer: str
    target_offset: int
    numel: int
    name: str
    rows: int = 1
    source_stride: int = 0


# All holders of exactly the same interval of a parameter, as (rank, chunk).
_Holders = Sequence[tuple[int, Chunk]]


@dataclass(frozen=True)
class _Held:
    """A parameter's chunks and the rank of each."""

    ranks: list[int]
    chunks: list[Chunk]


class SourceIndex:
    """The chunks of all source ranks by parameter. Build it once to plan for several target ranks.

    In a world of a thousand ranks under stage 3 these are hundreds of thousands of chunks, of which a rank needs a few.
    """

    def __init__(self, sources: Sequence[RankLayout]) -> None:
        self._held: dict[str, _Held] = {}
        # Put in order when a target first asks: under stages 1 and 2 one rank holds few of all the parameters.
        self._ordered: dict[str, tuple[Sequence[int], Sequence[_Holders]]] = {}
        for rank, layout in enumerate(sources):
            for chunk in layout.chunks:
                held = self._held.get(chunk[0])
                if held is None:
                    held = self._held[chunk[0]] = _Held([], [])
                held.ranks.append(rank)
                held.chunks.append(chunk)

    def plan(self, target: RankLayout, spread: int = 0) -> tuple[ReadItem, ...]:
        """Items that fill every element of the target's chunks exactly once, in order of the target's buffers.

        Where several sources hold the same elements, parameters are spread over them; `spread` (for example the
        target's rank) turns the choice, so that different targets ask different sources. Raises IntegrityError naming
        the parameter and the range where no source holds an element.
        """
        items: list[ReadItem] = []
        for chunk in sorted(target.chunks, key=lambda chunk: (chunk.buffer, chunk.offset)):
            at = chunk.start
            while at < chunk.stop:
                item, _ = self._item(chunk, at, spread)
                at += item.numel
                if items and _continues(items[-1], item):
                    item = _joined(items.pop(), item)
                items.append(item)
        return tuple(items)

    def plan_rows(self, first: Chunk, rows: int, stride: int, spread: int = 0) -> Iterator[ReadItem]:
        """The same for `rows` rows that each begin `stride` (> the row's elements) behind the one before in their
        parameter, and follow each other in the target; `first` is the first of them. An item has as many as one
        source holds whole."""
        row = 0
        while row < rows:
            start, offset = first.start + row * stride, first.offset + row * first.numel
            chunk = Chunk(first.name, start, first.numel, first.buffer, offset)
            at, whole = start, 0
            while at < chunk.stop:
                item, source = self._item(chunk, at, spread)
                if item.numel == first.numel:
                    whole = min(rows - row, (source.stop - chunk.stop) // stride + 1)
                    item = replace(item, rows=whole, source_stride=stride if whole > 1 else 0)
                yield item
                at += item.numel
            row += whole or 1

    def _item(self, chunk: Chunk, at: int, spread: int) -> tuple[ReadItem, Chunk]:
        """The longest item that fills `chunk` from element `at` of its parameter on, and what it is read of."""
        starts, held = self._intervals(chunk.name)
        found = bisect_right(starts, at) - 1
        if found < 0 or held[found][0][1].stop <= at:
            end = min(starts[found + 1] if found + 1 < len(starts) else chunk.stop, chunk.stop)
            raise IntegrityError(f"no source holds elements [{at}, {end}) of parameter {chunk.name!r}")
        holders = held[found]
        # crc32 and not hash(): every process must choose the same source in every run.
        chosen = (crc32(chunk.name.encode()) + spread) % len(holders) if len(holders) > 1 else 0
        rank, source = holders[chosen]
        item = ReadItem(
            source_rank=rank,
            source_buffer=source.buffer,
            source_offset=source.offset + at - source.start,
            target_buffer=chunk.buffer,
            target_offset=chunk.offset + at - chunk.start,
            numel=min(source.stop, chunk.stop) - at,
            name=chunk.name,
        )
        return item, source

    def _intervals(self, name: str) -> tuple[Sequence[int], Sequence[_Holders]]:
        if name not in self._ordered:
            self._ordered[name] = _in_order(self._held.get(name, _Held([], [])))
        return self._ordered[name]


def plan_rank(sources: Sequence[RankLayout], target: RankLayout, *, spread: int = 0) -> tuple[ReadItem, ...]:
    """What the holder of `target` must read from which rank; see `SourceIndex.plan`. `sources` are indexed by rank."""
    return SourceIndex(sources).plan(target, spread)


class _OneEach(Sequence[_Holders]):
    """Of chunks that each one rank holds; nothing is made of those that nobody asks for."""

    def __init__(self, held: _Held) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held.ranks)

    def __getitem__(self, index: Any) -> Any:
        return ((self._held.ranks[index], self._held.chunks[index]),)


def _in_order(held: _Held) -> tuple[Sequence[int], Sequence[_Holders]]:
    """Starts and intervals in order, such that both starts and stops strictly grow."""
    _, starts, numels, *_ = zip(*held.chunks, strict=True) if held.chunks else ((), (), ())
    # As ranks hold it where nothing is replicated.
    if all(map(le, map(add, starts, numels), starts[1:])):
        return starts, _OneEach(held)
    return _disjointed(list(zip(held.ranks, held.chunks, strict=True)))


def _disjointed(chunks: list[tuple[int, Chunk]]) -> tuple[list[int], list[_Holders]]:
    """The same of chunks in any order.

    Equal intervals are put together as holders of one. An interval inside another is dropped: the larger one serves.
    Then the last interval that starts at or before an element holds it, if any does.
    """
    starts: list[int] = []
    held: list[list[tuple[int, Chunk]]] = []
    for rank, chunk in sorted(chunks, key=lambda holder: (holder[1].start, -holder[1].stop, holder[0])):
        reached = held[-1][0][1].stop if held else 0
        if held and starts[-1] == chunk.start and reached == chunk.stop:
            held[-1].append((rank, chunk))
        elif chunk.stop > reached:
            starts.append(chunk.start)
            held.append([(rank, chunk)])
    return starts, list(held)


def _continues(first: ReadItem, second: ReadItem) -> bool:
    return (
        first.source_rank == second.source_rank
        and first.source_buffer == second.source_buffer
        and first.target_buffer == second.target_buffer
        and first.source_offset + first.numel == second.source_offset
        and first.target_offset + first.numel == second.target_offset
    )


def _joined(first: ReadItem, second: ReadItem) -> ReadItem:
    return ReadItem(
        first.source_rank,
        first.source_buffer,
        first.source_offset,
        first.target_buffer,
        first.target_offset,
        first.numel + second.numel,
        first.name,
    )
