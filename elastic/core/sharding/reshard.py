"""The plan that turns one layout into another: read items as plain data, made before a byte moves.

Per parameter this is an intersection of two lists of intervals. Sources are indexed once by name, and each item finds
its source by bisection, so the cost is linear (up to that logarithm) in the chunks read plus the items made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, RankLayout


@dataclass(frozen=True)
class ReadItem:
    """Read `numel` elements from a source rank's buffer into a buffer of the target rank. Counts are elements.

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


# All holders of exactly the same interval of a parameter, as (rank, chunk).
_Holders = list[tuple[int, Chunk]]


class SourceIndex:
    """The chunks of all source ranks by parameter. Build it once to plan for several target ranks."""

    def __init__(self, sources: Sequence[RankLayout]) -> None:
        self._chunks: dict[str, list[tuple[int, Chunk]]] = {}
        # Put in order when a target first asks: under stages 1 and 2 one rank holds few of all the parameters.
        self._ordered: dict[str, tuple[list[int], list[_Holders]]] = {}
        for rank, layout in enumerate(sources):
            for chunk in layout.chunks:
                self._chunks.setdefault(chunk.name, []).append((rank, chunk))

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
                item = self._item(chunk, at, spread)
                at += item.numel
                if items and _continues(items[-1], item):
                    item = _joined(items.pop(), item)
                items.append(item)
        return tuple(items)

    def _item(self, chunk: Chunk, at: int, spread: int) -> ReadItem:
        """The longest item that fills `chunk` from element `at` of its parameter on."""
        starts, held = self._intervals(chunk.name)
        found = bisect_right(starts, at) - 1
        if found < 0 or held[found][0][1].stop <= at:
            end = min(starts[found + 1] if found + 1 < len(starts) else chunk.stop, chunk.stop)
            raise IntegrityError(f"no source holds elements [{at}, {end}) of parameter {chunk.name!r}")
        holders = held[found]
        # crc32 and not hash(): every process must choose the same source in every run.
        chosen = (crc32(chunk.name.encode()) + spread) % len(holders) if len(holders) > 1 else 0
        rank, source = holders[chosen]
        return ReadItem(
            source_rank=rank,
            source_buffer=source.buffer,
            source_offset=source.offset + at - source.start,
            target_buffer=chunk.buffer,
            target_offset=chunk.offset + at - chunk.start,
            numel=min(source.stop, chunk.stop) - at,
            name=chunk.name,
        )

    def _intervals(self, name: str) -> tuple[list[int], list[_Holders]]:
        if name not in self._ordered:
            self._ordered[name] = _disjointed(self._chunks.get(name, []))
        return self._ordered[name]


def plan_rank(sources: Sequence[RankLayout], target: RankLayout, *, spread: int = 0) -> tuple[ReadItem, ...]:
    """What the holder of `target` must read from which rank; see `SourceIndex.plan`. `sources` are indexed by rank."""
    return SourceIndex(sources).plan(target, spread)


def _disjointed(chunks: list[tuple[int, Chunk]]) -> tuple[list[int], list[_Holders]]:
    """Starts and intervals in order, such that both starts and stops strictly grow.

    Equal intervals are put together as holders of one. An interval inside another is dropped: the larger one serves.
    Then the last interval that starts at or before an element holds it, if any does.
    """
    starts: list[int] = []
    held: list[_Holders] = []
    for rank, chunk in sorted(chunks, key=lambda holder: (holder[1].start, -holder[1].stop, holder[0])):
        reached = held[-1][0][1].stop if held else 0
        if held and starts[-1] == chunk.start and reached == chunk.stop:
            held[-1].append((rank, chunk))
        elif chunk.stop > reached:
            starts.append(chunk.start)
            held.append([(rank, chunk)])
    return starts, held


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
