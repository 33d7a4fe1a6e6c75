"""One rank's snapshot as one safetensors file, streamed from the snapshot's own memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from elastic.checkpoint.digest import partial_digests
from elastic.checkpoint.safetensors_header import FileTensor, in_file_order, make_header
from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.core.checkpoint.manifest import ShardRecord, StoredTensor
from elastic.core.errors import IntegrityError, UsageError, Where
from elastic.core.names import shard_file
from elastic.core.sharding.layout import check_rank

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}

_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_CHUNK_BYTES = 8 << 20


def torch_dtype(name: str) -> torch.dtype:
    """Raises IntegrityError for a name that no checkpoint of this project has."""
    if name not in _BY_NAME:
        raise IntegrityError(f"a stored tensor has the unknown dtype {name!r}")
    return _BY_NAME[name]


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises UsageError naming the tensor, if its values cannot be carried."""
    if dtype not in DTYPE_NAMES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise UsageError(f"{name!r} has dtype {dtype}, which a checkpoint cannot carry; known are {known}")


@dataclass(frozen=True)
class ShardFile:
    """The plan of a shard file: its header, and the position of each tensor."""

    header: bytes
    tensors: tuple[StoredTensor, ...]
    bytes: int


def plan_file(snapshot: ShardSnapshot) -> ShardFile:
    """Raises IntegrityError when the snapshot violates what `ShardSnapshot` promises."""
    _check(snapshot)
    metadata = {
        "run": snapshot.run_id,
        "generation": str(snapshot.generation),
        "step": str(snapshot.step),
        "rank": str(snapshot.rank),
        "world_size": str(snapshot.world_size),
    }
    tensors = (
        FileTensor(key, DTYPE_NAMES[tensor.dtype], (tensor.numel(),)) for key, tensor in snapshot.tensors.items()
    )
    header, placed = make_header(in_file_order(tensors), metadata)
    stored = tuple(StoredTensor(tensor.name, tensor.dtype, tensor.numel, tensor.begin) for tensor in placed)
    return ShardFile(header, stored, len(header) + sum(tensor.bytes for tensor in placed))


class ShardStream:
    """The bytes of a shard file, hashed as they pass. Iterate once, then ask for the record."""

    def __init__(self, snapshot: ShardSnapshot) -> None:
        self._snapshot = snapshot
        self._file = plan_file(snapshot)
        self._hash = xxhash.xxh3_64()

    def __iter__(self) -> Iterator[memoryview]:
        self._hash.reset()
        self._hash.update(self._file.header)
        yield memoryview(self._file.header)
        for stored in self._file.tensors:
            view = bytes_of(self._snapshot.tensors[stored.key])
            for at in range(0, len(view), _CHUNK_BYTES):
                chunk = view[at : at + _CHUNK_BYTES]
                self._hash.update(chunk)
                yield chunk

    def record(self) -> ShardRecord:
        """The shard's record, to be reported once all bytes are in storage."""
        snapshot = self._snapshot
        return ShardRecord(
            rank=snapshot.rank,
            world_size=snapshot.world_size,
            generation=snapshot.generation,
            step=snapshot.step,
            file=shard_file(snapshot.rank, snapshot.world_size),
            bytes=self._file.bytes,
            xxh3=self._hash.hexdigest(),
            tensors=self._file.tensors,
            chunks=snapshot.layout.chunks,
            digests=partial_digests(snapshot.layout, snapshot.tensors),
            extra_state=snapshot.extra_state,
            zero_stage=snapshot.zero_stage,
            parameters=snapshot.parameters,
            tp=snapshot.tp,
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a 1-D contiguous CPU tensor as writable bytes, not a copy. The tensor must outlive the view."""
    return tensor.detach().view(torch.uint8).numpy().data if tensor.numel() else memoryview(bytearray())


def _check(snapshot: ShardSnapshot) -> None:
    where = Where(rank=snapshot.rank, step=snapshot.step, generation=snapshot.generation)
    check_rank(snapshot.layout)
    for key, tensor in snapshot.tensors.items():
        kind, slash, buffer = key.partition("/")
        if not (kind and slash and buffer in snapshot.layout.buffers):
            raise IntegrityError(f"a snapshot's tensor {key!r} is not <kind>/<buffer> of a buffer in its layout", where)
        if tensor.dtype not in DTYPE_NAMES:
            raise IntegrityError(f"a snapshot's tensor {key!r} has dtype {tensor.dtype}, which cannot be stored", where)
        if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            raise IntegrityError(f"a snapshot's tensor {key!r} is not 1-D contiguous CPU memory", where)
        if tensor.numel() != snapshot.layout.buffers[buffer]:
            length = snapshot.layout.buffers[buffer]
            raise IntegrityError(f"a snapshot's {key!r} has {tensor.numel()} elements, its layout says {length}", where)
    held = {key.partition("/")[2] for key in snapshot.tensors}
    for buffer, length in snapshot.layout.buffers.items():
        if length and buffer not in held:
            raise IntegrityError(f"a snapshot's layout has a buffer {buffer!r}, but no tensor for it is given", where)
