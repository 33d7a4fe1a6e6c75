"""The stored elements of one lane's slices of a checkpoint, by the model's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.checkpoint.digest import digest
from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.core.checkpoint.lanes import lane_of
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.core.sharding.reshard import SourceIndex

_TARGET = "target"


class LaneReader:
    """`shapes` are those of the lane's slices; of a checkpoint without lanes, of the whole tensors."""

    def __init__(self, source: CheckpointSource, manifest: Manifest, lane: int = 0) -> None:
        self._source, self._whole = source, manifest
        self._lane = lane_of(manifest, lane)
        self._index = SourceIndex([shard.layout for shard in self._lane.shards])
        self.shapes: Mapping[str, tuple[int, ...]] = self._lane.parameters
        self.digests: Mapping[str, int] = self._lane.digests

    def read_into(self, name: str, kind: str, start: int, target: torch.Tensor) -> None:
        """Fill `target` (1-D, stored dtype) with the slice's elements from `start` on. Not verified."""
        numel = target.numel()
        if not numel:
            return
        wanted = RankLayout((Chunk(name, start, numel, _TARGET, 0),), {_TARGET: numel})
        ranges = [
            ReadRange(
                self._lane.shards[item.source_rank].rank,
                f"{kind}/{item.source_buffer}",
                item.source_offset,
                item.numel,
                target[item.target_offset : item.target_offset + item.numel],
            )
            for item in self._index.plan(wanted)
        ]
        self._source.read(self._whole, ranges)

    def read(self, name: str, kind: str, target: torch.Tensor) -> None:
        """Fill `target` (1-D, stored dtype) with all of the slice. Raises IntegrityError unless its digest agrees."""
        self.read_into(name, kind, 0, target)
        key = f"{kind}/{name}"
        if target.numel() and digest(target, key) != self.digests.get(key):
            raise IntegrityError(f"{kind} of {name!r} in checkpoint {self._whole.id} is not what was written")
