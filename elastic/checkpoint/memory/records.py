"""Shard records as JSON, for messages between servers: an exact form, checked when it is read."""

from __future__ import annotations

from typing import Any

from elastic.core.checkpoint.manifest import Json, ShardRecord, StoredTensor
from elastic.core.checkpoint.manifest_json import ITEM_BYTES, check_json
from elastic.core.errors import IntegrityError
from elastic.core.names import check_file
from elastic.core.sharding.layout import Chunk, check_rank


def template_to_json(record: ShardRecord) -> dict[str, Json]:
    """What is constant in a generation: without step, digests and extra state."""
    parameters = record.parameters
    return {
        "rank": record.rank,
        "world_size": record.world_size,
        "generation": record.generation,
        "zero_stage": record.zero_stage,
        "tp": record.tp,
        "file": record.file,
        "bytes": record.bytes,
        "tensors": [[t.key, t.dtype, t.numel, t.begin] for t in record.tensors],
        "pieces": [[p.name, p.start, p.numel, p.buffer, p.offset] for p in record.chunks],
        "parameters": None if parameters is None else [[name, list(shape)] for name, shape in parameters.items()],
    }


def template_from_json(data: Json) -> ShardRecord:
    """Raises IntegrityError for anything that `template_to_json` would not have written."""
    try:
        record = ShardRecord(
            rank=count(data["rank"]),
            world_size=count(data["world_size"]),
            generation=count(data["generation"]),
            step=0,
            file=check_file(text(data["file"])),
            bytes=count(data["bytes"]),
            xxh3="",
            tensors=tuple(StoredTensor(text(k), text(d), count(n), count(b)) for k, d, n, b in data["tensors"]),
            chunks=tuple(
                Chunk(text(name), count(start), count(numel), text(buffer), count(offset))
                for name, start, numel, buffer, offset in data["pieces"]
            ),
            digests={},
            zero_stage=count(data["zero_stage"]),
            tp=count(data["tp"]),
            parameters=None
            if data["parameters"] is None
            else {text(name): tuple(map(count, shape)) for name, shape in data["parameters"]},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"a shard's record is malformed: {error!r}") from error
    check_template(record)
    return record


def check_template(record: ShardRecord) -> None:
    """Raises IntegrityError unless every tensor lies inside the shard and every chunk inside its tensors."""
    for tensor in record.tensors:
        if "/" not in tensor.key or tensor.dtype not in ITEM_BYTES:
            raise IntegrityError(f"a shard's record has the tensor {tensor.key!r} of dtype {tensor.dtype!r}")
        if tensor.begin + tensor.numel * ITEM_BYTES[tensor.dtype] > record.bytes:
            raise IntegrityError(f"tensor {tensor.key!r} ends after its shard of {record.bytes} bytes")
    check_rank(record.layout)


def extra_state_from_json(value: Json) -> dict[str, Json] | None:
    """What is not a tensor. Raises IntegrityError unless it is None or an object that JSON carries exactly."""
    if value is not None and not isinstance(value, dict):
        raise IntegrityError("a snapshot's extra state is not a JSON object")
    check_json(value, "extra_state")
    return value


def count(value: Any) -> int:
    """Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


def text(value: Any) -> str:
    """Raises ValueError."""
    if type(value) is not str:
        raise ValueError(f"{value!r} is not text")
    return value
