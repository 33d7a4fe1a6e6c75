"""Which rank holds which slice of which parameter: the one schema that all ZeRO stages reduce to.

A rank holds *buffers* (flat 1-D arrays). A *chunk* says that `numel` elements of parameter `name`, beginning at element
`start` of the flattened parameter, lie at `offset` in a buffer. Whatever no chunk covers is padding and has no meaning.
The same chunks hold for every kind of tensor that has the buffer's shape: `master`, `exp_avg`, `exp_avg_sq`, ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic.core.errors import IntegrityError


class Chunk(NamedTuple):
    """One contiguous run of elements of one parameter inside one buffer. All figures are counts of elements.

    A tuple, which is made in a third of a dataclass's time: every worker reads all of a manifest's.
    """

    name: str
    start: int
    numel: int
    buffer: str
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds. `buffers` gives each buffer's length in elements, padding included."""

    chunks: tuple[Chunk, ...] = ()
    buffers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """What every rank holds, by rank. `numels` gives each parameter's total number of elements."""

    numels: Mapping[str, int]
    ranks: tuple[RankLayout, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)


def merged(*layouts: RankLayout) -> RankLayout:
    """One rank's layouts as one, for example its ZeRO partition and its share of the replicated state.

    Raises IntegrityError when two of them use the same name for a buffer.
    """
    buffers: dict[str, int] = {}
    for layout in layouts:
        for name, length in layout.buffers.items():
            if name in buffers:
                raise IntegrityError(f"two layouts of one rank both have a buffer {name!r}: a tensor must be renamed")
            buffers[name] = length
    return RankLayout(tuple(chunk for layout in layouts for chunk in layout.chunks), buffers)


def without(layout: RankLayout, names: Collection[str]) -> RankLayout:
    """The layout less the chunks of these tensors: they become padding, or their buffer is left out where it held
    nothing else."""
    if not names:
        return layout
    gone = {chunk.buffer for chunk in layout.chunks if chunk.name in names}
    chunks = tuple(chunk for chunk in layout.chunks if chunk.name not in names)
    gone -= {chunk.buffer for chunk in chunks}
    return RankLayout(chunks, {name: length for name, length in layout.buffers.items() if name not in gone})


def check_rank(layout: RankLayout) -> None:
    """Raises IntegrityError unless every chunk lies inside its buffer and no two chunks share an element of one."""
    filled: dict[str, int] = {}
    for chunk in sorted(layout.chunks, key=lambda chunk: (chunk.buffer, chunk.offset)):
        length = layout.buffers.get(chunk.buffer)
        if length is None:
            raise IntegrityError(f"a chunk of {chunk.name!r} names buffer {chunk.buffer!r}, which does not exist")
        if chunk.start < 0 or chunk.numel < 1 or chunk.offset < 0 or chunk.offset + chunk.numel > length:
            raise IntegrityError(f"a chunk of {chunk.name!r} does not fit into {chunk.buffer!r} of {length} elements")
        if chunk.offset < filled.get(chunk.buffer, 0):
            raise IntegrityError(f"a chunk of {chunk.name!r} overlaps the chunk before it in buffer {chunk.buffer!r}")
        filled[chunk.buffer] = chunk.offset + chunk.numel


def check_cover(name: str, numel: int, spans: Iterable[tuple[int, int, int]]) -> None:
    """Raises IntegrityError unless the spans (start, stop, rank) hold each of the `numel` elements exactly once."""
    reached, before = 0, -1
    for start, stop, rank in sorted(spans):
        if start > reached:
            raise IntegrityError(f"no rank holds elements [{reached}, {start}) of {name!r}")
        if start < reached:
            raise IntegrityError(f"ranks {before} and {rank} both hold elements from {start} on of {name!r}")
        reached, before = stop, rank
    if reached != numel:
        what = "no rank holds" if reached < numel else "the model does not have"
        low, high = sorted((reached, numel))
        raise IntegrityError(f"{what} elements [{low}, {high}) of {name!r}")
