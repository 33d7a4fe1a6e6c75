"""Which part of which parameter group a rank holds where ranks share experts: two partitions in one engine.

Dense parameters are partitioned over all ranks, a layer's experts over those with the same ones
(deepspeed/runtime/zero/stage_1_and_2.py:862-884, stage3.py:644-740; release 0.19.8). A rank's experts are neighbours on
the first dimension, so that they are an interval of the whole tensor: chunks are those of the whole. Or each of them is
a tensor by itself, with a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.core.sharding.layout import Chunk, Layout, RankLayout, merged
from elastic.core.sharding.zero import Group

# (the tensors of one group, how many ranks it is partitioned over, as which rank) -> the layout of that rank, at least.
Partition = Callable[[Group, int, int], Layout]


@dataclass(frozen=True)
class Place:
    """One rank of a world of which a share of the experts is on each `beside` neighbours, and all of them are on `ep`
    such. `apart`: each expert is a tensor by itself."""

    rank: int
    world_size: int
    ep: int = 1
    apart: bool = False
    beside: int = 1

    @property
    def share(self) -> int:
        """Which part of the experts the rank has."""
        return self.rank // self.beside % self.ep

    @property
    def alike(self) -> tuple[int, ...] | None:
        """The ranks with the same experts; None: all have all of them."""
        if self.ep == 1:
            return None
        return tuple(rank for rank in range(self.world_size) if rank // self.beside % self.ep == self.share)

    def among(self, experts: bool) -> tuple[int, int]:
        """(rank, size) in the ranks that a group, of experts or dense, is partitioned over."""
        if not experts:
            return self.rank, self.world_size
        cell, own = divmod(self.rank, self.ep * self.beside)
        return cell * self.beside + own % self.beside, self.world_size // self.ep

    def first(self, numel: int, experts: bool) -> int:
        """Where in the whole tensor the `numel` elements begin of which this rank holds a part."""
        return self.share * numel if experts and not self.apart else 0


def neighbours(ranks: Sequence[int]) -> int:
    """How many of these ascending ranks follow one another from the first on."""
    return next((at for at, rank in enumerate(ranks) if rank != ranks[0] + at), len(ranks))


def held(groups: Sequence[tuple[Group, bool]], place: Place, partition: Partition, buffer: str) -> RankLayout:
    """What the rank holds of (tensors, are they experts?), with as many elements as all ranks together hold of one
    rank's experts. Buffers are numbered through as "<buffer><number>"."""
    parts: list[RankLayout] = []
    number = 0
    for tensors, experts in groups:
        rank, size = place.among(experts)
        own = partition(tensors, size, rank).ranks[rank]
        names = {old: f"{buffer}{number + at}" for at, old in enumerate(own.buffers)}
        numels = dict(tensors)
        chunks = (_moved(chunk, names, place.first(numels[chunk.name], experts)) for chunk in own.chunks)
        parts.append(RankLayout(tuple(chunks), {names[old]: length for old, length in own.buffers.items()}))
        number += len(names)
    return merged(*parts)


def _moved(chunk: Chunk, names: dict[str, str], first: int) -> Chunk:
    return chunk._replace(start=chunk.start + first, buffer=names[chunk.buffer])
