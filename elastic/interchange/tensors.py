"""The tensors of a checkpoint by name, whole and one at a time, whatever world size and ZeRO stage wrote it."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from elastic.checkpoint.digest import digest
from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.core.checkpoint.lanes import require_whole
from elastic.core.checkpoint.manifest import Json, Manifest, StoredTensor
from elastic.core.errors import IntegrityError
from elastic.core.sharding.layout import Chunk, RankLayout
from elastic.core.sharding.reshard import SourceIndex
from elastic.engines.live_state import BUFFER, KEPT, MASTER, PARAM

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_TARGET = "target"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the state_dict. `kind` is MASTER (trained), PARAM (frozen) or BUFFER; `dtype` is the stored one."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class CheckpointTensors:
    """`tensors` are those of the model's state_dict, in the model's order: buffers outside of it are left out, and so
    are the tensors of objects that the user has registered.

    `aliases` maps every other name of a shared (tied) tensor to the one name that it is stored under.
    """

    def __init__(self, source: CheckpointSource, manifest: Manifest) -> None:
        require_whole(manifest)
        self.manifest = manifest
        self._source = source
        self._index = SourceIndex([shard.layout for shard in manifest.shards])
        self._stored = _stored_dtypes(manifest)
        fleeting = set(manifest.extra_state.get("fleeting_buffers", ()))
        self.tensors: dict[str, TensorInfo] = {
            name: self._info(name, tuple(shape))
            for name, shape in manifest.parameters.items()
            if name not in fleeting and self._stored.get(name, {}).keys() != {KEPT}
        }
        self.aliases: dict[str, str] = {
            alias: name for alias, name in self.model.get("aliases", {}).items() if name in self.tensors
        }

    @property
    def model(self) -> Mapping[str, Json]:
        """What `engines.model.description` said of the model; empty for a checkpoint from before it did."""
        found = self.manifest.extra_state.get("model")
        return found if isinstance(found, Mapping) else {}

    @property
    def registered(self) -> list[str]:
        """The names of the objects that the run has registered (`elastic.state.register`)."""
        caller = self.manifest.extra_state.get("caller")
        return sorted(caller.get("objects") or ()) if isinstance(caller, Mapping) else []

    def state_kinds(self, name: str) -> list[str]:
        """The kinds of optimizer state that the checkpoint has of a parameter, for example "exp_avg"."""
        return sorted(self._stored.get(name, {}).keys() - {MASTER, PARAM, BUFFER})

    def read(self, name: str, kind: str | None = None) -> torch.Tensor:
        """One tensor, whole, of its own shape and the stored dtype. Raises IntegrityError unless its digest agrees."""
        info = self.tensors[name]
        kind = kind or info.kind
        dtype = self._stored.get(name, {}).get(kind, info.dtype)
        flat = _own_pages(info.numel, dtype)
        self.read_into(name, 0, flat, kind)
        key = f"{kind}/{name}"
        if info.numel and digest(flat, key) != self.manifest.digests.get(key):
            raise IntegrityError(f"{kind} of {name!r} in checkpoint {self.manifest.id} is not what was written")
        return flat.view(info.shape)

    def read_into(self, name: str, start: int, target: torch.Tensor, kind: str | None = None) -> None:
        """Fill `target` (1-D, stored dtype) with the elements from `start` on. Not verified."""
        kind = kind or self.tensors[name].kind
        numel = target.numel()
        if not numel:
            return
        wanted = RankLayout((Chunk(name, start, numel, _TARGET, 0),), {_TARGET: numel})
        ranges = [
            ReadRange(
                item.source_rank,
                f"{kind}/{item.source_buffer}",
                item.source_offset,
                item.numel,
                target[item.target_offset : item.target_offset + item.numel],
            )
            for item in self._index.plan(wanted)
        ]
        self._source.read(self.manifest, ranges)

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        stored = self._stored.get(name, {})
        kind = next((kind for kind in (MASTER, PARAM, BUFFER) if kind in stored), None)
        if kind is None and 0 not in shape:
            raise IntegrityError(f"checkpoint {self.manifest.id} names {name!r} but holds no value of it")
        # A tensor without elements is in no shard, and its dtype is not known.
        return TensorInfo(name, kind or BUFFER, shape, stored[kind] if kind else torch.float32)


def _own_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty 1-D tensor whose memory goes back to the system with it. The allocator's need not: a small object in the
    place of a tensor that was freed keeps the next one from fitting there, and an export grows to the model's size."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)


def _stored_dtypes(manifest: Manifest) -> dict[str, dict[str, torch.dtype]]:
    """Name -> kind -> dtype."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for shard in manifest.shards:
        buffers: dict[str, dict[str, torch.dtype]] = {}
        for kind, buffer, dtype in _keys(manifest.id, shard.tensors):
            buffers.setdefault(buffer, {})[kind] = dtype
        for chunk in shard.chunks:
            found.setdefault(chunk.name, {}).update(buffers.get(chunk.buffer, {}))
    return found


def _keys(checkpoint: str, tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, str, torch.dtype]]:
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise IntegrityError(f"checkpoint {checkpoint} holds {tensor.key!r} as the unknown dtype {tensor.dtype!r}")
        kind, buffer = tensor.key.split("/", 1)
        yield kind, buffer, _DTYPES[tensor.dtype]
