"""From a checkpoint to host memory: exactly what this rank's layout needs, nothing installed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.core.checkpoint.manifest import Manifest, StoredTensor
from elastic.core.errors import IntegrityError, ModelMismatch
from elastic.core.sharding.layout import RankLayout
from elastic.core.sharding.reshard import ReadItem, plan_rank
from elastic.engines.live_state import KEPT, MASTER, Extra, Master
from elastic.training.state.dtypes import torch_dtype


@dataclass(frozen=True)
class Staged:
    """`tensors` by buffer of the live layout and kind, in the stored dtype; elements outside all chunks are zero."""

    manifest: Manifest
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    bytes_read: int
    bytes_needed: int

    def master(self, master: Master) -> torch.Tensor:
        return self.tensors[master.buffer][MASTER]

    def states(self, master: Master) -> dict[str, torch.Tensor]:
        """The optimizer's tensors for one master, by their names."""
        return {kind: tensor for kind, tensor in self.tensors[master.buffer].items() if kind != MASTER}

    def extra(self, extra: Extra) -> torch.Tensor:
        return self.tensors[extra.chunk.buffer][extra.kind]


def read_checkpoint(
    source: CheckpointSource, manifest: Manifest, target: RankLayout, masters: Iterable[Master], rank: int
) -> Staged:
    """Read every range that `target` needs straight into its place. Not collective.

    Raises IntegrityError (the checkpoint lacks something), StorageError, or ModelMismatch (one tensor, two dtypes).
    """
    stored = [_by_buffer(shard.tensors) for shard in manifest.shards]
    items = plan_rank([shard.layout for shard in manifest.shards], target, spread=rank)
    dtypes = _dtypes(items, stored)
    # A rank whose part is all padding reads nothing, but its optimizer still has state there.
    kinds = _kinds(manifest)
    for master in masters:
        for kind in sorted({kind for name in master.names for kind in kinds.get(name, ())}):
            own = dtypes.setdefault(master.buffer, {})
            if kind not in own:
                own[kind] = _any_dtype(manifest, kind)
    tensors = {
        buffer: {kind: torch.zeros(target.buffers[buffer], dtype=torch_dtype(dtype)) for kind, dtype in own.items()}
        for buffer, own in dtypes.items()
    }
    ranges = [read for item in items for read in _ranges(item, stored[item.source_rank], tensors)]
    needed = sum(read.target.numel() * read.target.element_size() for read in ranges)
    return Staged(manifest, tensors, source.read(manifest, ranges), needed)


def kept_in(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Memory for the tensors that the checkpoint has besides the model's, by name, 1-D."""
    stored = (tensor for shard in manifest.shards for tensor in shard.tensors)
    named = ((tensor, tensor.key.split("/", 1)) for tensor in stored)
    return {
        name: torch.empty(tensor.numel, dtype=torch_dtype(tensor.dtype))
        for tensor, (kind, name) in named
        if kind == KEPT
    }


def check_dtypes(masters: Iterable[Master], extras: Iterable[Extra], staged: Staged) -> None:
    """Weights are never cast: a cast master is another training run. Optimizer state takes the stored dtype."""
    pairs = [(master.names[0], master.tensor, staged.master(master)) for master in masters]
    pairs += [(extra.chunk.name, extra.tensor, staged.extra(extra)) for extra in extras]
    for name, live, stored in pairs:
        if live.dtype != stored.dtype:
            raise ModelMismatch(f"{name!r} is held as {live.dtype} here, as {stored.dtype} in the checkpoint")


def _by_buffer(tensors: Iterable[StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Buffer -> kind -> tensor."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        kind, buffer = tensor.key.split("/", 1)
        found.setdefault(buffer, {})[kind] = tensor
    return found


def _dtypes(items: Iterable[ReadItem], stored: list[dict[str, dict[str, StoredTensor]]]) -> dict[str, dict[str, str]]:
    """Target buffer -> kind -> dtype."""
    found: dict[str, dict[str, str]] = {}
    for item in items:
        own = found.setdefault(item.target_buffer, {})
        for kind, tensor in stored[item.source_rank].get(item.source_buffer, {}).items():
            if own.setdefault(kind, tensor.dtype) != tensor.dtype:
                raise ModelMismatch(
                    f"the checkpoint holds {kind!r} of {item.name!r} as {tensor.dtype} and of a parameter that shares "
                    f"its flat tensor here as {own[kind]}"
                )
    return found


def _ranges(
    item: ReadItem, stored: Mapping[str, Mapping[str, StoredTensor]], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> list[ReadRange]:
    found = []
    for kind, tensor in stored.get(item.source_buffer, {}).items():
        target = tensors[item.target_buffer][kind][item.target_offset : item.target_offset + item.numel]
        found.append(ReadRange(item.source_rank, tensor.key, item.source_offset, item.numel, target))
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
