"""The tensors of a checkpoint by name, whole and one at a time, whatever world size, ZeRO stage and mesh wrote it.

Where ranks shared layers, each lane has a slice of some tensors (`core.sharding.cuts`): slices are put together here,
and what is whole in every lane is read of the first.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from elastic.checkpoint.shards import DTYPE_NAMES
from elastic.checkpoint.source import CheckpointSource
from elastic.core.checkpoint.lanes import cuts_of, lane_name
from elastic.core.checkpoint.manifest import Json, Manifest, StoredTensor
from elastic.core.errors import IntegrityError
from elastic.core.sharding.cuts import Box, boxes
from elastic.engines.live_state import BUFFER, KEPT, MASTER, PARAM
from elastic.interchange.lane_reader import LaneReader

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# (lane, first element in its slice, the elements): contiguous ones, as they were read.
Seen = Callable[[int, int, torch.Tensor], None]


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
        """Raises UsageError for slices that cannot be put together, by name."""
        self.manifest = manifest
        self._cuts = cuts_of(manifest)
        self._lanes = [LaneReader(source, manifest, lane) for lane in range(manifest.tp)]
        self._stored = _stored_dtypes(manifest)
        fleeting = set(manifest.extra_state.get("fleeting_buffers", ()))
        self.tensors: dict[str, TensorInfo] = {
            name: self._info(name, self._cuts[name].shape if name in self._cuts else tuple(shape))
            for name, shape in self._lanes[0].shapes.items()
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

    def slices(self, name: str, kind: str | None = None) -> dict[int, tuple[str, int]]:
        """What a tensor is stored as: lane -> (key in the manifest, number of elements); of a whole one, one."""
        key = f"{kind or self.tensors[name].kind}/{name}"
        cut, tp = self._cuts.get(name), self.manifest.tp
        if cut is None:
            return {0: (lane_name(key, 0, tp), self.tensors[name].numel)}
        return {lane: (lane_name(key, lane, tp), torch.Size(cut.slice_shape(lane)).numel()) for lane in range(tp)}

    def read(self, name: str, kind: str | None = None) -> torch.Tensor:
        """One tensor, whole, of its own shape and the stored dtype. Raises IntegrityError unless its digest agrees, or
        that of each slice of it."""
        info = self.tensors[name]
        kind = kind or info.kind
        dtype = self._stored.get(name, {}).get(kind, info.dtype)
        flat = _own_pages(info.numel, dtype)
        cut = self._cuts.get(name)
        if cut is None:
            self._lanes[0].read(name, kind, flat)
            return flat.view(info.shape)
        places = boxes(cut, 0, info.numel)
        for lane, (_, numel) in self.slices(name, kind).items():
            part = _own_pages(numel, dtype)
            self._lanes[lane].read(name, kind, part)
            for box in places:
                if box.lane == lane:
                    _put(flat, part[box.source :], box)
        return flat.view(info.shape)

    def read_into(
        self, name: str, start: int, target: torch.Tensor, kind: str | None = None, seen: Seen | None = None
    ) -> None:
        """Fill `target` (1-D, contiguous, stored dtype) with the elements from `start` on. Not verified: `seen` is told
        all elements once, as they are stored."""
        kind = kind or self.tensors[name].kind
        cut = self._cuts.get(name)
        places = _one_box(start, target.numel()) if cut is None else boxes(cut, start, start + target.numel())
        for box in places:
            at_once = box.rows == 1
            part = target[box.target : box.target + box.width] if at_once else _own_pages(box.span, target.dtype)
            self._lanes[box.lane].read_into(name, kind, box.source, part)
            if not at_once:
                _put(target, part, box)
            if seen is not None:
                for first, numel in _runs(box):
                    seen(box.lane, box.source + first, part[first : first + numel])

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        stored = self._stored.get(name, {})
        kind = next((kind for kind in (MASTER, PARAM, BUFFER) if kind in stored), None)
        if kind is None and 0 not in shape:
            raise IntegrityError(f"checkpoint {self.manifest.id} names {name!r} but holds no value of it")
        # A tensor without elements is in no shard, and its dtype is not known.
        return TensorInfo(name, kind or BUFFER, shape, stored[kind] if kind else torch.float32)


def _one_box(start: int, numel: int) -> list[Box]:
    """Of a tensor that one lane has whole."""
    return [Box(0, start, numel, 0, numel, 1, numel)] if numel else []


def _runs(box: Box) -> Iterator[tuple[int, int]]:
    """The box's rows in its span, one after another or, where nothing lies between them, as one: (first, number)."""
    if box.source_stride == box.width:
        yield 0, box.span
        return
    yield from ((row * box.source_stride, box.width) for row in range(box.rows))


def _put(target: torch.Tensor, part: torch.Tensor, box: Box) -> None:
    """The box's elements into their places in `target`; `part` (1-D) are a slice's, from the box's first one on."""
    size = (box.rows, box.width)
    there = target.as_strided(size, (box.target_stride, 1), target.storage_offset() + box.target)
    there.copy_(part.as_strided(size, (box.source_stride, 1), part.storage_offset()))


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
