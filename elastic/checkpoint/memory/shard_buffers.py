"""The rows of the buffer table: shard keys, their buffers, and facts about whole shards. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import Where

SnapshotRef = tuple[int, int]  # (generation, step), compares by age


@dataclass(frozen=True, order=True)
class ShardKey:
    """`stripe`: parity of these ranks' shards, of which `rank` is the first."""

    generation: int
    rank: int
    replica: bool
    stripe: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose shards can be read or rebuilt from it."""
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
class ShardBuffer:
    """`step` is None while the buffer is incomplete. A buffer with `users` is neither overwritten nor freed.

    `content` is what the owner of the memory knows about the present bytes.
    """

    id: int
    key: ShardKey
    step: int | None = None
    users: int = 0
    dropped: bool = False
    content: Any = None

    @property
    def ref(self) -> SnapshotRef | None:
        return None if self.step is None else (self.key.generation, self.step)


@dataclass(frozen=True)
class ShardShape:
    """`templates` are the records of the ranks, as far as they are known."""

    world_size: int
    nbytes: int
    templates: Mapping[int, ShardRecord] = field(default_factory=dict, compare=False)

    def joined(self, other: ShardShape) -> ShardShape:
        """The shape of a stripe once one more rank is known: as long as the longest shard."""
        templates = {**self.templates, **other.templates}
        return replace(other, nbytes=max(self.nbytes, other.nbytes), templates=templates)

    def agrees(self, other: ShardShape) -> bool:
        both = self.templates.keys() & other.templates.keys()
        return self == other and all(self.templates[rank].bytes == other.templates[rank].bytes for rank in both)
