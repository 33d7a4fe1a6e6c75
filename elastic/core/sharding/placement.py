"""Which worker gets which rank: the one on whose node most of that rank's state already is.

All layouts cut the state in the order of ranks, into shares of equal size up to padding (`zero.py`): of W ranks, rank r
holds about the fraction [r/W, (r+1)/W) of every large tensor or flat buffer. So what a new rank will read of an old
rank's shard follows from the two world sizes alone, and this needs no layout. It decides about time, not about content:
any order of ranks restores the same state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain

from elastic.core.checkpoint.snapshots import Copies
from elastic.core.mesh import Mesh
from elastic.core.sharding.matching import best_matching

# The node and the workers of one slot.
Slot = tuple[str | None, Sequence[int]]
# (block of ranks, node, gain).
Overlap = tuple[int, str, int]


def members_in_order(
    slots: Sequence[Slot],
    size: int,
    copies: Copies,
    cell: int = 1,
    leader: int | None = None,
    before: Mesh | None = None,
    after: Mesh | None = None,
) -> tuple[int, ...]:
    """`size` of the slots' workers, by rank, such that as much as can be of what they will read is on their nodes.

    A slot's workers stay neighbours, in the order in which they are given. The slot of `leader`, who was rank 0, keeps
    the first ranks as long as it is there: loggers and the like live in rank 0's process. Where nothing is known of the
    nodes ranks follow the order of `slots`; so they do where slots are parts of a cell of `cell` ranks, unless the mesh
    is known that the copies' ranks had `before`, and that which ranks will have. Of orders that are
    equally good it is the one in which most of the state is on the nodes that it would be read from anyway.
    """
    blocks = _first(slots, size)
    in_parts = any(len(workers) % cell for _, workers in blocks)
    if not copies.nodes or (in_parts and (before is None or after is None)):
        return tuple(chain.from_iterable(workers for _, workers in blocks))
    # Slots that are not needed for the size stand by with what they hold.
    places = [*blocks, *slots[len(blocks) :]]
    led = next((place for place, (_, workers) in enumerate(places) if leader in workers), None)
    sizes = [len(workers) for _, workers in blocks]
    if in_parts and before is not None and after is not None:
        wanted = _matched(sizes, places, _of_parts(sizes, copies, before, after), led)
    else:
        wanted = _matched(sizes, places, _overlaps(sizes, copies), led)
    return tuple(chain.from_iterable(places[place][1] for place in wanted))


def _first(slots: Sequence[Slot], size: int) -> list[Slot]:
    """The slots of the first `size` workers, the last one cut to what is needed of it."""
    blocks: list[Slot] = []
    for node, workers in slots:
        if size > 0:
            blocks.append((node, workers[:size]))
            size -= len(workers)
    return blocks


def _matched(sizes: Sequence[int], places: Sequence[Slot], overlaps: Sequence[Overlap], led: int | None) -> list[int]:
    """For each block of ranks its place, which has as many workers; place `led` for the first one."""
    by_node: dict[str, list[tuple[int, int]]] = {}
    for place, (node, workers) in enumerate(places):
        if node is not None:
            by_node.setdefault(node, []).append((place, len(workers)))
    gains: list[dict[int, int]] = [{} for _ in sizes]
    for block, node, gain in overlaps:
        row, wanted = gains[block], sizes[block]
        for place, size in by_node.get(node, ()):
            if size == wanted:
                row[place] = row.get(place, 0) + gain
    if led is not None and len(places[led][1]) == sizes[0]:
        for row in gains:
            row.pop(led, None)
        gains[0] = {led: 1}
    found = best_matching(gains)
    free = set(range(len(places))).difference(place for place in found if place is not None)
    left: dict[int, list[int]] = {}
    for place in sorted(free, reverse=True):
        left.setdefault(len(places[place][1]), []).append(place)
    return [left[size].pop() if place is None else place for size, place in zip(sizes, found, strict=True)]


def _of_parts(sizes: Sequence[int], copies: Copies, before: Mesh, after: Mesh) -> list[Overlap]:
    """As `_overlaps`, where ranks have parts of the model (`Mesh.part`): neighbours have stages of a pipeline, say, and
    nothing in common. A unit is that of both meshes' lanes and places."""
    (_, lanes, _, places), (_, new_lanes, _, new_places) = before.part(0), after.part(0)
    units = lanes * new_lanes * places * new_places
    held = [
        (low * new_places, high * new_places, left * new_lanes, right * new_lanes, node, weight)
        for node, first_choice, others in copies.nodes
        for spans, weight in ((first_choice, units + 1), (others, units))
        for span in spans
        for left, right, low, high in boxes_of(before, *span)
    ]
    held.sort()
    tallest = max(high - low for low, high, *_ in held)
    lows = [low for low, *_ in held]
    found, rank = [], 0
    for block, size in enumerate(sizes):
        for left, right, low, high in boxes_of(after, rank, rank + size):
            left, right, low, high = left * lanes, right * lanes, low * places, high * places
            for other in held[bisect_right(lows, low - tallest) : bisect_left(lows, high)]:
                width = min(right, other[3]) - max(left, other[2])
                height = min(high, other[1]) - max(low, other[0])
                if width > 0 and height > 0:
                    found.append((block, other[4], width * height * other[5]))
        rank += size
    return found


# Of a thousand ranks on nodes of eight 128 for each mesh that may come next, asked twice.
@lru_cache(maxsize=1 << 14)
def boxes_of(mesh: Mesh, begin: int, end: int) -> list[tuple[int, int, int, int]]:
    """What these ranks have: (first lane, last + 1, first place, last + 1), joined where they are neighbours."""
    rows: list[tuple[int, int, int, int]] = []
    for rank in range(begin, end):
        lane, _, place, _ = mesh.part(rank)
        if rows and rows[-1][1:3] == (lane, place):
            rows[-1] = (rows[-1][0], lane + 1, place, place + 1)
        else:
            rows.append((lane, lane + 1, place, place + 1))
    joined: list[tuple[int, int, int, int]] = []
    for row in sorted(rows):
        if joined and joined[-1][:2] == row[:2] and joined[-1][3] == row[2]:
            joined[-1] = (*joined[-1][:3], row[3])
        else:
            joined.append(row)
    return joined


def _overlaps(sizes: Sequence[int], copies: Copies) -> list[Overlap]:
    """(block, node, gain) for each run of ranks that a node holds and a block reads of.

    A unit of state is 1 / (old ranks * new ranks) of it. Whatever is first in `copies` counts one unit more in all than
    what is not: it decides between assignments that are equally good otherwise.
    """
    before, after = copies.ranks, sum(sizes)
    edges = [ranks * before for ranks in accumulate(sizes, initial=0)]
    found = []
    for node, first_choice, others in copies.nodes:
        for spans, weight in ((first_choice, before * after + 1), (others, before * after)):
            for begin, end in spans:
                low, last = begin * after, end * after
                stop = bisect_right(edges, low)
                while low < last:
                    high = min(edges[stop], last)
                    found.append((stop - 1, node, (high - low) * weight))
                    low, stop = high, stop + 1
    return found
