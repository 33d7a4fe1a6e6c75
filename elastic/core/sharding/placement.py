"""Which worker gets which rank: the one on whose node most of that rank's state already is.

All layouts cut the state in the order of ranks, into shares of equal size up to padding (`zero.py`): of W ranks, rank r
holds about the fraction [r/W, (r+1)/W) of every large tensor or flat buffer. So what a new rank will read of an old
rank's shard follows from the two world sizes alone, and this needs no layout. It decides about time, not about content:
any order of ranks restores the same state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain

from elastic.core.checkpoint.snapshots import Copies
from elastic.core.sharding.matching import best_matching

# The node and the workers of one slot.
Slot = tuple[str | None, Sequence[int]]


def members_in_order(
    slots: Sequence[Slot], size: int, copies: Copies, cell: int = 1, leader: int | None = None
) -> tuple[int, ...]:
    """`size` of the slots' workers, by rank, such that as much as can be of what they will read is on their nodes.

    A slot's workers stay neighbours, in the order in which they are given. The slot of `leader`, who was rank 0, keeps
    the first ranks as long as it is there: loggers and the like live in rank 0's process. Where nothing is known of the
    nodes, and where slots are parts of a cell of `cell` ranks, ranks follow the order of `slots`. Of orders that are
    equally good it is the one in which most of the state is on the nodes that it would be read from anyway.
    """
    blocks = _first(slots, size)
    if not copies.nodes or any(len(workers) % cell for _, workers in blocks):
        return tuple(chain.from_iterable(workers for _, workers in blocks))
    # Slots that are not needed for the size stand by with what they hold.
    places = [*blocks, *slots[len(blocks) :]]
    led = next((place for place, (_, workers) in enumerate(places) if leader in workers), None)
    wanted = _matched([len(workers) for _, workers in blocks], places, copies, led)
    return tuple(chain.from_iterable(places[place][1] for place in wanted))


def _first(slots: Sequence[Slot], size: int) -> list[Slot]:
    """The slots of the first `size` workers, the last one cut to what is needed of it."""
    blocks: list[Slot] = []
    for node, workers in slots:
        if size > 0:
            blocks.append((node, workers[:size]))
            size -= len(workers)
    return blocks


def _matched(sizes: Sequence[int], places: Sequence[Slot], copies: Copies, led: int | None) -> list[int]:
    """For each block of ranks its place, which has as many workers; place `led` for the first one."""
    by_node: dict[str, list[tuple[int, int]]] = {}
    for place, (node, workers) in enumerate(places):
        if node is not None:
            by_node.setdefault(node, []).append((place, len(workers)))
    gains: list[dict[int, int]] = [{} for _ in sizes]
    for block, node, gain in _overlaps(sizes, copies):
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


def _overlaps(sizes: Sequence[int], copies: Copies) -> list[tuple[int, str, int]]:
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
