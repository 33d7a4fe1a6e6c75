"""Which rank holds which slice of which parameter: the one schema that all ZeRO stages reduce to.

A rank holds *buffers* (flat 1-D arrays). A *piece* says that `numel` elements of parameter `name`, beginning at element
`start` of the flattened parameter, lie at `offset` in a buffer. Whatever no piece covers is padding and has no meaning.
The same pieces hold for every kind of tensor that has the buffer's shape: `master`, `exp_avg`, `exp_avg_sq`, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Piece:
    """One contiguous run of elements of one parameter inside one buffer. All figures are counts of elements."""

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

    pieces: tuple[Piece, ...] = ()
    buffers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """What every rank holds, by rank. `numels` gives each parameter's total number of elements."""

    numels: Mapping[str, int]
    ranks: tuple[RankLayout, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)
