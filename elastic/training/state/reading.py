"""From a checkpoint to host memory: exactly what this rank's layout needs, nothing installed yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.core.errors import IntegrityError, ModelMismatch
from elastic.core.layout import RankLayout
from elastic.core.manifest import Manifest, StoredTensor
from elastic.core.plan import Copy, plan_rank
from elastic.training.state.dtypes import torch_dtype
from elastic.training.state.live import MASTER, Master


@dataclass(frozen=True)
class Staged:
    """`tensors` by "<kind>/<buffer>" of the live layout, in the stored dtype; what no piece covers is zero."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    bytes_read: int
    bytes_needed: int

    def states(self, master: Master) -> dict[str, torch.Tensor]:
        """The optimizer's tensors for one master, by their names."""
        suffix = f"/{master.buffer}"
        kinds = [key.removesuffix(suffix) for key in self.tensors if key.endswith(suffix)]
        return {kind: self.tensors[kind + suffix] for kind in kinds if "/" not in kind and kind != MASTER}


def read_checkpoint(
    source: CheckpointSource, manifest: Manifest, target: RankLayout, masters: Iterable[Master], rank: int
) -> Staged:
    """Read every range that `target` needs straight into its place. Not collective.

    Raises IntegrityError (the checkpoint lacks something), StorageError, or ModelMismatch (one tensor, two dtypes).
    """
    stored = [_by_buffer(shard.tensors) for shard in manifest.shards]
    copies = plan_rank([shard.layout for shard in manifest.shards], target, spread=rank)
    dtypes = _dtypes(copies, stored)
    # A rank whose part is all padding copies nothing, but its optimizer still has state there.
    for master in masters:
        for kind in _kinds(manifest, master):
            dtypes.setdefault(f"{kind}/{master.buffer}", _any_dtype(manifest, kind))
    tensors = {
        key: torch.zeros(target.buffers[key.split("/", 1)[1]], dtype=torch_dtype(dtype))
        for key, dtype in dtypes.items()
    }
    ranges = [read for copy in copies for read in _ranges(copy, stored[copy.source_rank], tensors)]
    needed = sum(read.target.numel() * read.target.element_size() for read in ranges)
    return Staged(manifest, tensors, source.read(manifest, ranges), needed)


def _by_buffer(tensors: Iterable[StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Buffer -> kind -> tensor."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        kind, buffer = tensor.key.split("/", 1)
        found.setdefault(buffer, {})[kind] = tensor
    return found


def _dtypes(copies: Iterable[Copy], stored: list[dict[str, dict[str, StoredTensor]]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for copy in copies:
        for kind, tensor in stored[copy.source_rank].get(copy.source_buffer, {}).items():
            key = f"{kind}/{copy.target_buffer}"
            if found.setdefault(key, tensor.dtype) != tensor.dtype:
                raise ModelMismatch(
                    f"the checkpoint holds {kind!r} of {copy.name!r} as {tensor.dtype} and of a parameter that shares "
                    f"its flat tensor here as {found[key]}"
                )
    return found


def _ranges(
    copy: Copy, stored: Mapping[str, Mapping[str, StoredTensor]], tensors: Mapping[str, torch.Tensor]
) -> list[ReadRange]:
    found = []
    for kind, tensor in stored.get(copy.source_buffer, {}).items():
        target = tensors[f"{kind}/{copy.target_buffer}"][copy.target_offset : copy.target_offset + copy.numel]
        found.append(ReadRange(copy.source_rank, tensor.key, copy.source_offset, copy.numel, target))
    return found


def _kinds(manifest: Manifest, master: Master) -> set[str]:
    """Kinds that any of the master's parameters has in the checkpoint."""
    names = set(master.names)
    keys = (key.split("/", 1) for key in manifest.digests)
    return {kind for kind, name in keys if name in names}


def _any_dtype(manifest: Manifest, kind: str) -> str:
    for shard in manifest.shards:
        for tensor in shard.tensors:
            if tensor.key.startswith(f"{kind}/"):
                return tensor.dtype
    raise IntegrityError(f"the manifest has content checks of {kind!r} but no shard holds any")
