"""From slices of another cut to memory where they are needed. What was read is digested twice, as it is stored and as
it is numbered here, before it is put anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from elastic.checkpoint.digest import digest_rows
from elastic.checkpoint.shards import torch_dtype
from elastic.checkpoint.source import BytesRead, CheckpointSource, ReadRange
from elastic.core.checkpoint.lanes import lane_of
from elastic.core.checkpoint.manifest import Manifest, StoredTensor
from elastic.core.checkpoint.recut import Recut
from elastic.core.errors import ModelMismatch
from elastic.core.sharding.cuts import Box
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.core.sharding.reshard import SourceIndex
from elastic.engines.inventory import Inventory
from elastic.training.state.reading import Staged, by_buffer, zeros

# Read at once, all kinds together.
_BATCH_BYTES = 64 << 20
_TARGET = "target"

# ("<kind>/<name>", lane) -> (sum of the partial digests modulo 2**64, number of elements), as they are stored.
Seen = dict[tuple[str, int], tuple[int, int]]
# "<kind>/<name>" -> sum of the partial digests of the elements in this rank's slices.
Made = dict[str, int]
# Name -> kind -> dtype.
_Stored = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class _Part:
    """Some elements of a live chunk; the target of the `box` is counted from the chunk's first."""

    chunk: Chunk
    box: Box

    @property
    def name(self) -> str:
        return self.chunk.name


def read_recut(
    source: CheckpointSource,
    found: Recut,
    manifest: Manifest,
    live: Inventory,
    rank: int,
    batch_bytes: int = _BATCH_BYTES,
) -> tuple[Staged, Seen, Made]:
    """Every range that `live` needs, what was read of each stored slice, and what that is here. Not collective.
    `manifest` is that of `found`, or a part of it.

    Tensors pass through host memory, `batch_bytes` at a time; of a row that is needed in part, that part is read.
    Raises IntegrityError (the checkpoint lacks something), StorageError, or ModelMismatch (one tensor, two dtypes).
    """
    stored = _stored_dtypes(found.whole)
    tensors, layout = _memory(live, stored), live.held()
    lanes = [_Lane(found, number, rank) for number in range(found.whole.tp)]
    read, seen, made, needed = BytesRead(), Seen(), Made(), 0
    for batch in _batches(found, layout, stored, batch_bytes):
        here = [{kind: _host(part.box, dtype) for kind, dtype in stored[part.name].items()} for part in batch]
        ranges = [
            each for part, own in zip(batch, here, strict=True) for each in lanes[part.box.lane].ranges(part, own)
        ]
        read += source.read(found.whole, ranges)
        for part, own in zip(batch, here, strict=True):
            for kind, values in own.items():
                _note(seen, made, f"{kind}/{part.name}", part, values)
                _put(tensors[part.chunk.buffer][kind], values, part)
                needed += values.nbytes
    return Staged(manifest, tensors, read, needed), seen, made


class _Lane:
    """Where the elements of one lane's slices are stored."""

    def __init__(self, found: Recut, lane: int, spread: int) -> None:
        self._shards = lane_of(found.whole, lane).shards
        self._index, self._spread = SourceIndex([shard.layout for shard in self._shards]), spread
        self._kinds = cache(lambda source_rank: by_buffer(self._shards[source_rank].tensors))

    def ranges(self, part: _Part, targets: Mapping[str, torch.Tensor]) -> Iterator[ReadRange]:
        """The rows of a box, into `targets` of each kind, one after another."""
        box, rows, width = part.box, part.box.rows, part.box.width
        if box.source_stride == width:
            # Nothing is between them.
            rows, width = 1, rows * width
        first = Chunk(part.name, box.source, width, _TARGET, 0)
        for item in self._index.plan_rows(first, rows, box.source_stride, self._spread):
            stored: Mapping[str, StoredTensor] = self._kinds(item.source_rank).get(item.source_buffer, {})
            for kind, tensor in stored.items():
                target = targets[kind][item.target_offset : item.target_offset + item.rows * item.numel]
                rank = self._shards[item.source_rank].rank
                yield ReadRange(rank, tensor.key, item.source_offset, item.numel, target, item.rows, item.source_stride)


def _memory(live: Inventory, stored: _Stored) -> dict[str, dict[str, torch.Tensor]]:
    """By live buffer and kind, where the live tensors lie. Raises ModelMismatch for one tensor of two dtypes."""
    wanted = [(master.buffer, master.names, master.tensor) for master in live.masters]
    wanted += [(extra.chunk.buffer, (extra.chunk.name,), extra.tensor) for extra in live.extras]
    found = {}
    for buffer, names, tensor in wanted:
        dtypes: dict[str, str] = {}
        for name in names:
            for kind, dtype in stored.get(name, {}).items():
                if dtypes.setdefault(kind, dtype) != dtype:
                    raise ModelMismatch(
                        f"the checkpoint holds {kind!r} of {name!r} as {dtype} and of a parameter that shares its flat "
                        f"tensor here as {dtypes[kind]}"
                    )
        found[buffer] = {kind: zeros(tensor.numel(), dtype, tensor.device) for kind, dtype in dtypes.items()}
    return found


def _batches(found: Recut, layout: RankLayout, stored: _Stored, nbytes: int) -> Iterator[list[_Part]]:
    """All that `layout` needs, cut where it is long, in batches of about so many bytes."""
    batch: list[_Part] = []
    size = 0
    for chunk in layout.chunks:
        item = sum(torch_dtype(dtype).itemsize for dtype in stored.get(chunk.name, {}).values())
        for whole in found.boxes(chunk.name, chunk.start, chunk.stop):
            for box in whole.pieces(max(1, nbytes // max(1, item))):
                batch.append(_Part(chunk, box))
                size += box.rows * box.width * item
                if size >= nbytes:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


def _host(box: Box, dtype: str) -> torch.Tensor:
    return torch.empty(box.rows * box.width, dtype=torch_dtype(dtype))


def _note(seen: Seen, made: Made, key: str, part: _Part, values: torch.Tensor) -> None:
    box = part.box
    total, count = seen.get((key, box.lane), (0, 0))
    stored = digest_rows(values, key, box.source, box.rows, box.source_stride)
    seen[key, box.lane] = (total + stored) % 2**64, count + values.numel()
    here = digest_rows(values, key, part.chunk.start + box.target, box.rows, box.target_stride)
    made[key] = (made.get(key, 0) + here) % 2**64


def _put(target: torch.Tensor, values: torch.Tensor, part: _Part) -> None:
    box = part.box
    size, begin = (box.rows, box.width), target.storage_offset() + part.chunk.offset + box.target
    target.as_strided(size, (box.target_stride, 1), begin).copy_(values.view(size))


def _stored_dtypes(whole: Manifest) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for shard in whole.shards:
        kinds = by_buffer(shard.tensors)
        for chunk in shard.chunks:
            own = found.setdefault(chunk.name, {})
            own |= {kind: tensor.dtype for kind, tensor in kinds.get(chunk.buffer, {}).items()}
    return found
