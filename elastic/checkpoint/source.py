"""Where the state of the next generation comes from.

A `CheckpointSource` is the seam between tiers: object storage and peer memory. The call order for one restore
is numbered; all calls come from the restoring worker's training thread, none of them is collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from elastic.core.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReadRange:
    """Read `numel` elements at `offset` (elements) of the stored tensor `key` of `rank`'s shard into `target`.

    `target` is a 1-D contiguous CPU tensor of exactly `numel` elements and of the stored dtype.
    """

    rank: int
    key: str
    offset: int
    numel: int
    target: torch.Tensor


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
