"""Where the state of the next generation comes from.

A `CheckpointSource` is the seam between tiers: object storage and peer memory. The call order for one restore
is numbered; all calls come from the restoring worker's training thread, none of them is collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from elastic.core.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReadRange:
    """Read `rows` rows of `numel` elements of the stored tensor `key` of `rank`'s shard into `target`: the first at
    `offset`, each `stride` behind the one before (elements).

    `target` is a 1-D contiguous CPU tensor of exactly `rows * numel` elements and of the stored dtype. Rows do not
    overlap; one row has no stride.
    """

    rank: int
    key: str
    offset: int
    numel: int
    target: torch.Tensor
    rows: int = 1
    stride: int = 0

    @property
    def stop(self) -> int:
        """The first element behind the last row."""
        return self.offset + (self.rows - 1) * self.stride + self.numel

    def split(self, elements: int) -> tuple[list[ReadRange], list[ReadRange]]:
        """The first `elements` of what it reads, and the others."""
        row, part = divmod(elements, self.numel)
        first, rest = [self._of(0, row)] if row else [], []
        if part:
            cut, row = self._of(row, row + 1), row + 1
            first.append(replace(cut, numel=part, target=cut.target[:part]))
            target = cut.target[part:]
            rest.append(replace(cut, offset=cut.offset + part, numel=target.numel(), target=target))
        return first, [*rest, self._of(row, self.rows)] if row < self.rows else rest

    def _of(self, row: int, end: int) -> ReadRange:
        target = self.target[row * self.numel : end * self.numel]
        stride = self.stride if end - row > 1 else 0
        return replace(self, offset=self.offset + row * self.stride, target=target, rows=end - row, stride=stride)


@dataclass(frozen=True)
class BytesRead:
    """Where the bytes of a restore came from: the memory of the reader's own node, that of other nodes over the
    network, or storage."""

    own_node: int = 0
    network: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.own_node + self.network + self.storage

    def __add__(self, other: BytesRead) -> BytesRead:
        return BytesRead(self.own_node + other.own_node, self.network + other.network, self.storage + other.storage)


class CheckpointSource(Protocol):
    """Read side of a tier. Raises `StorageError` (unreachable) or `IntegrityError` (missing, short, malformed)."""

    @property
    def name(self) -> str:
        """What incidents call this tier, for example "storage"."""
        ...

    def manifest(self, checkpoint_id: str) -> Manifest:
        """1. The manifest. The shards may still be damaged: the content checks detect that."""
        ...

    def read(self, manifest: Manifest, ranges: Sequence[ReadRange]) -> BytesRead:
        """2. Fill every target; returns the bytes fetched. May coalesce neighbouring ranges."""
        ...
