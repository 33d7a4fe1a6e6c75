"""From a checkpoint to memory where it is needed: exactly what this rank's layout needs, nothing installed yet.

What a device needs goes through two pinned buffers: one is filled from the source while the other is copied to the
device. Without them the copy would begin when everything was read, and take a second time as long from memory that is
not pinned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from elastic.checkpoint.shards import torch_dtype
from elastic.checkpoint.shares import Shares
from elastic.checkpoint.source import BytesRead, CheckpointSource, ReadRange
from elastic.comm.device_stream import DeviceStream, enqueues
from elastic.core.checkpoint.manifest import Manifest, StoredTensor
from elastic.core.checkpoint.shares import is_share
from elastic.core.errors import IntegrityError, ModelMismatch
from elastic.core.sharding.reshard import ReadItem, plan_rank
from elastic.engines.inventory import Inventory
from elastic.engines.live_state import KEPT, MASTER, Extra, Master
from elastic.training.state.host import host_memory
from elastic.training.state.pins import Pins

logger = logging.getLogger(__name__)

# Long enough that asking the source costs nothing beside reading, short enough to be pinned in a twentieth of a second.
_BUFFER_BYTES = 256 << 20
# Every dtype is aligned.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Staged:
    """`tensors` by buffer of the live layout and kind, in the stored dtype; elements outside all chunks are zero.

    They lie where the live ones do, or in host memory where the device has no room, and are nobody else's: what an
    optimizer keeps may be taken over as it is.
    """

    manifest: Manifest
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    bytes_from: BytesRead
    bytes_needed: int

    def master(self, master: Master) -> torch.Tensor:
        return self.tensors[master.buffer][MASTER]

    def states(self, master: Master) -> dict[str, torch.Tensor]:
        """The optimizer's tensors for one master, by their names."""
        return {kind: tensor for kind, tensor in self.tensors[master.buffer].items() if kind != MASTER}

    def extra(self, extra: Extra) -> torch.Tensor:
        return self.tensors[extra.chunk.buffer][extra.kind]


def read_checkpoint(
    source: CheckpointSource, manifest: Manifest, live: Inventory, rank: int, buffer_bytes: int = _BUFFER_BYTES
) -> Staged:
    """Read every range that `live` needs, for a device through buffers of `buffer_bytes`. Not collective.

    Raises IntegrityError (the checkpoint lacks something), StorageError, or ModelMismatch (one tensor, two dtypes).
    """
    target = live.held()
    stored = cache(lambda source_rank: by_buffer(manifest.shards[source_rank].tensors))
    items = plan_rank([shard.layout for shard in manifest.shards], target, spread=rank)
    dtypes = _dtypes(items, stored)
    # A rank whose part is all padding reads nothing, but its optimizer still has state there.
    kinds = _kinds(manifest)
    for master in live.masters:
        for kind in sorted({kind for name in master.names for kind in kinds.get(name, ())}):
            own = dtypes.setdefault(master.buffer, {})
            if kind not in own:
                own[kind] = _any_dtype(manifest, kind)
    devices = {master.buffer: master.tensor.device for master in live.masters}
    devices |= {extra.chunk.buffer: extra.tensor.device for extra in live.extras}
    tensors = {
        buffer: {kind: zeros(target.buffers[buffer], dtype, devices[buffer]) for kind, dtype in own.items()}
        for buffer, own in dtypes.items()
    }
    ranks = [shard.rank for shard in manifest.shards]
    ranges = [
        read for item in items for read in _ranges(item, ranks[item.source_rank], stored(item.source_rank), tensors)
    ]
    needed = sum(read.target.numel() * read.target.element_size() for read in ranges)
    return Staged(manifest, tensors, _read(source, manifest, ranges, buffer_bytes), needed)


def zeros(numel: int, dtype: str, device: torch.device) -> torch.Tensor:
    """On `device`; in host memory where that has no room for both the masters and what is read of them."""
    try:
        return torch.zeros(numel, dtype=torch_dtype(dtype), device=device)
    except torch.OutOfMemoryError:
        logger.info("%d elements of a checkpoint wait in host memory: the device has no room for them yet", numel)
        return torch.zeros(numel, dtype=torch_dtype(dtype))


def _read(source: CheckpointSource, manifest: Manifest, ranges: Sequence[ReadRange], buffer_bytes: int) -> BytesRead:
    """Fill all targets, wherever they lie; returns the bytes fetched, by where they came from."""
    there = [each for each in ranges if enqueues(each.target.device)]
    here = [each for each in ranges if not enqueues(each.target.device)]
    count = source.read(manifest, here) if here or not there else BytesRead()
    return count + _read_to_device(source, manifest, there, buffer_bytes) if there else count


def _read_to_device(
    source: CheckpointSource, manifest: Manifest, ranges: Sequence[ReadRange], nbytes: int
) -> BytesRead:
    device = ranges[0].target.device
    stream, pins = DeviceStream(device), Pins(device)
    in_order = sorted(ranges, key=lambda each: (each.rank, each.key, each.offset))
    nbytes = min(nbytes, sum(each.target.nbytes + _ALIGNMENT_BYTES for each in in_order))
    # A buffer, and when the device has read it.
    idle: list[tuple[torch.Tensor, torch.Event | None]] = []
    count = BytesRead()
    try:
        for number, batch in enumerate(_batches(in_order, nbytes)):
            if number < 2:
                buffer, copied = host_memory(nbytes), None
                pins.pin(buffer)
            else:
                buffer, copied = idle.pop(0)
            if copied is not None:
                copied.synchronize()
            views = [
                (each.target, buffer[begin : begin + each.target.nbytes].view(each.target.dtype))
                for begin, each in batch
            ]
            reads = [replace(each, target=view) for (_, each), (_, view) in zip(batch, views, strict=True)]
            count += source.read(manifest, reads)
            for target, view in views:
                stream.copy(target, view)
            idle.append((buffer, stream.mark()))
        for _, copied in idle:
            if copied is not None:
                copied.synchronize()
    finally:
        pins.close()
    return count


def _batches(ranges: Iterable[ReadRange], nbytes: int) -> Iterator[list[tuple[int, ReadRange]]]:
    """The ranges, cut where they are long, in batches that fit into a buffer, with the byte at which each begins."""
    batch: list[tuple[int, ReadRange]] = []
    end = 0
    for each in ranges:
        done, item = 0, each.target.element_size()
        while done < each.numel:
            begin = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            numel = min(each.numel - done, (nbytes - begin) // item)
            if numel < 1:
                yield batch
                batch, end = [], 0
                continue
            target = each.target[done : done + numel]
            batch.append((begin, replace(each, offset=each.offset + done, numel=numel, target=target)))
            done, end = done + numel, begin + numel * item
    if batch:
        yield batch


def kept_in(manifest: Manifest, shares: Shares) -> dict[str, torch.Tensor]:
    """Memory for the tensors that this rank reads of the checkpoint besides the model's, by name, 1-D.

    Raises UsageError where the checkpoint has shares and this run has no use for them."""
    stored = (tensor for shard in manifest.shards for tensor in shard.tensors if tensor.key.startswith(f"{KEPT}/"))
    named = ((tensor.key.removeprefix(f"{KEPT}/"), tensor) for tensor in stored)
    return {
        name: torch.empty(tensor.numel, dtype=torch_dtype(tensor.dtype))
        for name, tensor in named
        if not is_share(name) or shares.reads(name)
    }


def check_dtypes(masters: Iterable[Master], extras: Iterable[Extra], staged: Staged) -> None:
    """Weights are never cast: a cast master is another training run. Optimizer state takes the stored dtype."""
    pairs = [(master.names[0], master.tensor, staged.master(master)) for master in masters]
    pairs += [(extra.chunk.name, extra.tensor, staged.extra(extra)) for extra in extras]
    for name, live, stored in pairs:
        if live.dtype != stored.dtype:
            raise ModelMismatch(f"{name!r} is held as {live.dtype} here, as {stored.dtype} in the checkpoint")


def by_buffer(tensors: Iterable[StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Buffer -> kind -> tensor."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        kind, buffer = tensor.key.split("/", 1)
        found.setdefault(buffer, {})[kind] = tensor
    return found


def _dtypes(
    items: Iterable[ReadItem], stored: Callable[[int], Mapping[str, Mapping[str, StoredTensor]]]
) -> dict[str, dict[str, str]]:
    """Target buffer -> kind -> dtype. `stored`: of a source rank, by buffer."""
    found: dict[str, dict[str, str]] = {}
    for item in items:
        own = found.setdefault(item.target_buffer, {})
        for kind, tensor in stored(item.source_rank).get(item.source_buffer, {}).items():
            if own.setdefault(kind, tensor.dtype) != tensor.dtype:
                raise ModelMismatch(
                    f"the checkpoint holds {kind!r} of {item.name!r} as {tensor.dtype} and of a parameter that shares "
                    f"its flat tensor here as {own[kind]}"
                )
    return found


def _ranges(
    item: ReadItem,
    rank: int,
    stored: Mapping[str, Mapping[str, StoredTensor]],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
) -> list[ReadRange]:
    found = []
    for kind, tensor in stored.get(item.source_buffer, {}).items():
        target = tensors[item.target_buffer][kind][item.target_offset : item.target_offset + item.numel]
        found.append(ReadRange(rank, tensor.key, item.source_offset, item.numel, target))
    return found


def _kinds(manifest: Manifest) -> dict[str, list[str]]:
    """Name -> the kinds that the checkpoint has of it."""
    found: dict[str, list[str]] = {}
    for key in manifest.digests:
        kind, name = key.split("/", 1)
        found.setdefault(name, []).append(kind)
    return found


def _any_dtype(manifest: Manifest, kind: str) -> str:
    for shard in manifest.shards:
        for tensor in shard.tensors:
            if tensor.key.startswith(f"{kind}/"):
                return tensor.dtype
    raise IntegrityError(f"the manifest has content checks of {kind!r} but no shard holds any")
