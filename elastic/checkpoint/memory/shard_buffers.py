"""What the books are about: lines, their copies, and what is known of a line as a whole. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import Where

Mark = tuple[int, int]  # (generation, step), so that marks compare by age


@dataclass(frozen=True, order=True)
class Line:
    """`stripe`: the line holds the parity of these ranks' shards, and `rank` is the first of them."""

    generation: int
    rank: int
    replica: bool
    stripe: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose shards can be had of the line."""
        return self.stripe or (self.rank,)

    @property
    def where(self) -> Where:
        return Where(rank=self.rank, generation=self.generation)

    @property
    def what(self) -> str:
        """For messages."""
        if self.stripe:
            return f"parity of ranks {', '.join(map(str, self.stripe))}"
        return f"replica of rank {self.rank}" if self.replica else f"rank {self.rank}"


@dataclass
class Copy:
    """`step` is None while the copy is incomplete. A copy with `users` is neither overwritten nor freed.

    `note` is what the owner of the memory knows of its present content.
    """

    id: int
    line: Line
    step: int | None = None
    users: int = 0
    dropped: bool = False
    note: Any = None

    @property
    def mark(self) -> Mark | None:
        return None if self.step is None else (self.line.generation, self.step)


@dataclass(frozen=True)
class Shape:
    """`templates` are the records of the ranks of the line, as far as they are known."""

    world_size: int
    nbytes: int
    templates: Mapping[int, ShardRecord] = field(default_factory=dict, compare=False)

    def joined(self, other: Shape) -> Shape:
        """Of a stripe of which one more rank is known: as long as the longest shard."""
        templates = {**self.templates, **other.templates}
        return replace(other, nbytes=max(self.nbytes, other.nbytes), templates=templates)

    def agrees(self, other: Shape) -> bool:
        both = self.templates.keys() & other.templates.keys()
        return self == other and all(self.templates[rank].bytes == other.templates[rank].bytes for rank in both)
