"""The exact JSON form of a manifest, and a reader that trusts nothing.

    {"format": 1, "check": <blake2b of the compact form of "manifest">, "manifest": {...}}

Format 1 keeps the keys that its first manifests have: the extra state is under "client", chunks under "pieces".
Format 2 is that of a checkpoint whose ranks held slices of the layers: "mesh" says how many lanes there are, and names
say their lane (`core.checkpoint.lanes`). Without lanes format 1 is written.

Chunks are kept as columns of numbers: names and buffers are indices into one table, and equal columns are written
once. A stage-3 checkpoint of 1,000 ranks and 500 parameters has half a million chunks and takes about 3 MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from elastic.core.checkpoint.manifest import FORMAT, FORMAT_OF_LANES, Json, Manifest, ShardRecord, StoredTensor
from elastic.core.collector import no_collection
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.names import check_file, check_run_id, parse_checkpoint_id
from elastic.core.sharding.layout import Chunk, check_rank

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_T = TypeVar("_T")


def to_json(manifest: Manifest) -> str:
    """One line of JSON. Raises IntegrityError when `extra_state` holds a value that does not survive a round trip.

    Tuples in `extra_state` become lists; that is the one difference that `from_json(to_json(m))` may show.
    """
    check_json(manifest.extra_state, "extra_state")
    columns = _Columns()
    body: dict[str, Json] = {
        "id": manifest.id,
        "run_id": manifest.run_id,
        "generation": manifest.generation,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "zero_stage": manifest.zero_stage,
        "written_at": manifest.written_at,
        "parameters": {name: list(shape) for name, shape in manifest.parameters.items()},
        "digests": {key: f"{digest:016x}" for key, digest in manifest.digests.items()},
        "client": manifest.extra_state,
        "versions": dict(manifest.versions),
        "shards": [_shard_to_json(shard, columns) for shard in manifest.shards],
        "words": list(columns.words),
        "columns": [list(column) for column in columns.columns],
    }
    if manifest.tp > 1:
        body["mesh"] = {"dp": manifest.world_size // manifest.tp, "tp": manifest.tp}
    text = _compact(body)
    number = FORMAT if manifest.tp == 1 else FORMAT_OF_LANES
    return f'{{"format":{number},"check":"{_check(text)}","manifest":{text}}}'


def check_json(value: Json, where: str) -> None:
    """Raises IntegrityError naming the first value that JSON has no exact form for."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise IntegrityError(f"{where} has the key {key!r}, but JSON only has text as keys")
            check_json(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            check_json(item, f"{where}[{number}]")
    elif value is not None and type(value) not in (str, bool, int, float):
        raise IntegrityError(f"{where} is a {type(value).__name__}, which has no JSON form")


@no_collection()
def from_json(text: str | bytes) -> Manifest:
    """Inverse of `to_json`. Raises IntegrityError with one sentence for anything that it would not have written."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the manifest is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") not in (FORMAT, FORMAT_OF_LANES):
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        known = f"formats {FORMAT} and {FORMAT_OF_LANES}"
        raise IntegrityError(f"the manifest has format {found!r}, this version reads {known}")
    body = _get(data, "manifest", dict)
    if _check(_compact(body)) != _get(data, "check", str):
        raise IntegrityError("the manifest does not match its own check: it was damaged or changed by hand")
    return _manifest(body, data["format"] == FORMAT_OF_LANES)


def _manifest(body: dict[str, Any], has_lanes: bool) -> Manifest:
    ref = parse_checkpoint_id(_get(body, "id", str))
    columns = [_numbers(column, "columns") for column in _get(body, "columns", list)]
    words = [_typed(word, str, "words") for word in _get(body, "words", list)]
    shards = tuple(_shard(item, words, columns) for item in _get(body, "shards", list))
    world_size = _count(body, "world_size")
    tp = _lanes(_get(body, "mesh", dict), world_size) if has_lanes else 1
    if (ref.step, ref.generation) != (_count(body, "step"), _count(body, "generation")):
        raise IntegrityError(f"the manifest of {ref.id} is about another step or generation")
    if any(
        (shard.step, shard.generation, shard.world_size) != (ref.step, ref.generation, world_size) for shard in shards
    ):
        raise IntegrityError(f"the manifest of {ref.id} has a shard of another step, generation or world size")
    # The length first: a list of as many ranks as a damaged number says may not fit into memory.
    if len(shards) != world_size or [shard.rank for shard in shards] != list(range(world_size)):
        raise IntegrityError(f"the manifest has not one shard for each of {world_size} ranks, in order")
    return Manifest(
        id=ref.id,
        run_id=_run_id(_get(body, "run_id", str)),
        generation=ref.generation,
        step=ref.step,
        world_size=world_size,
        zero_stage=_count(body, "zero_stage"),
        parameters=_shapes(_get(body, "parameters", dict)),
        shards=tuple(replace(shard, tp=tp) for shard in shards) if has_lanes else shards,
        digests=_digests(_get(body, "digests", dict)),
        extra_state=_get(body, "client", dict),
        versions={key: _typed(value, str, key) for key, value in _get(body, "versions", dict).items()},
        written_at=_number(body, "written_at"),
        tp=tp,
    )


def _lanes(mesh: dict[str, Any], world_size: int) -> int:
    dp, tp = _count(mesh, "dp"), _count(mesh, "tp")
    if dp < 1 or tp < 2 or dp * tp != world_size:
        raise IntegrityError(f"the manifest's mesh of dp {dp} and tp {tp} is not one of {world_size} ranks")
    return tp


class _Columns:
    """Tables of words and of columns of numbers, each distinct one kept once."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.columns: dict[tuple[int, ...], int] = {}

    def word(self, word: str) -> int:
        return self.words.setdefault(word, len(self.words))

    def column(self, numbers: Sequence[int]) -> int:
        return self.columns.setdefault(tuple(numbers), len(self.columns))


def _shard_to_json(shard: ShardRecord, columns: _Columns) -> dict[str, Json]:
    chunks = shard.chunks
    data: dict[str, Json] = {
        "rank": shard.rank,
        "world_size": shard.world_size,
        "generation": shard.generation,
        "step": shard.step,
        "zero_stage": shard.zero_stage,
        "file": shard.file,
        "bytes": shard.bytes,
        "xxh3": shard.xxh3,
        "tensors": [[tensor.key, tensor.dtype, tensor.numel, tensor.begin] for tensor in shard.tensors],
        "pieces": [
            columns.column([columns.word(chunk.name) for chunk in chunks]),
            columns.column([chunk.start for chunk in chunks]),
            columns.column([chunk.numel for chunk in chunks]),
            columns.column([columns.word(chunk.buffer) for chunk in chunks]),
            columns.column([chunk.offset for chunk in chunks]),
        ],
    }
    if shard.digests:
        data["digests"] = {key: f"{digest:016x}" for key, digest in shard.digests.items()}
    if shard.extra_state is not None:
        check_json(shard.extra_state, "extra_state")
        data["client"] = shard.extra_state
    if shard.parameters is not None:
        data["parameters"] = {name: list(shape) for name, shape in shard.parameters.items()}
    return data


def _shard(data: Json, words: list[str], columns: list[list[int]]) -> ShardRecord:
    data = _typed(data, dict, "shards")
    numbers = [_at(columns, index, "columns") for index in _numbers(_get(data, "pieces", list), "pieces")]
    if len(numbers) != 5 or len({len(column) for column in numbers}) != 1:
        raise IntegrityError("the manifest's chunks are not five columns of one length")
    shard = ShardRecord(
        rank=_count(data, "rank"),
        world_size=_count(data, "world_size"),
        generation=_count(data, "generation"),
        step=_count(data, "step"),
        zero_stage=_count(data, "zero_stage"),
        file=check_file(_get(data, "file", str)),
        bytes=_count(data, "bytes"),
        xxh3=_get(data, "xxh3", str),
        tensors=tuple(_tensor(item, _count(data, "bytes")) for item in _get(data, "tensors", list)),
        chunks=_chunks(words, *numbers),
        digests=_digests(_get(data, "digests", dict) if "digests" in data else {}),
        extra_state=_get(data, "client", dict) if "client" in data else None,
        parameters=_shapes(_get(data, "parameters", dict)) if "parameters" in data else None,
    )
    if len({tensor.key for tensor in shard.tensors}) != len(shard.tensors):
        raise IntegrityError(f"the manifest has two tensors of one name in {shard.file}")
    check_rank(shard.layout)
    return shard


def _chunks(
    words: list[str], names: list[int], starts: list[int], numels: list[int], buffers: list[int], offsets: list[int]
) -> tuple[Chunk, ...]:
    """Once for each rank, and not for each chunk: whether the words are there."""
    for index in (max(names, default=-1), max(buffers, default=-1)):
        if index >= 0:
            _at(words, index, "words")
    word = words.__getitem__
    return tuple(map(Chunk, map(word, names), starts, numels, map(word, buffers), offsets))


def _tensor(item: Json, file_bytes: int) -> StoredTensor:
    if not isinstance(item, list) or len(item) != 4:
        raise IntegrityError("the manifest has a tensor that is not [key, dtype, numel, begin]")
    key, dtype = _typed(item[0], str, "key"), _typed(item[1], str, "dtype")
    numel, begin = _numbers(item[2:], key)
    if "/" not in key or dtype not in ITEM_BYTES:
        raise IntegrityError(
            f"the manifest has a tensor {key!r} of dtype {dtype!r}, which is none that is written here"
        )
    if begin + numel * ITEM_BYTES[dtype] > file_bytes:
        raise IntegrityError(f"tensor {key!r} would end behind its file of {file_bytes} bytes")
    return StoredTensor(key, dtype, numel, begin)


def _run_id(text: str) -> str:
    try:
        return check_run_id(text)
    except UsageError as error:
        raise IntegrityError(f"the manifest is of no valid run: {error.message}") from error


def _digests(data: dict[str, Any]) -> dict[str, int]:
    try:
        return {key: int(_typed(value, str, key), 16) for key, value in data.items()}
    except ValueError as error:
        raise IntegrityError(f"the manifest has a content check that is no number: {error}") from error


def _shapes(data: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(_numbers(_typed(shape, list, name), name)) for name, shape in data.items()}


def _at(table: list[_T], index: int, what: str) -> _T:
    if index >= len(table):
        raise IntegrityError(f"the manifest asks for entry {index} of {len(table)} {what}")
    return table[index]


def _get(data: dict[str, Any], key: str, kind: type[_T]) -> _T:
    if key not in data:
        raise IntegrityError(f"the manifest lacks the field {key!r}")
    return _typed(data[key], kind, key)


def _typed(value: Json, kind: type[_T], what: str) -> _T:
    # Not isinstance(): True is an int in Python but not in JSON.
    if type(value) is not kind:
        raise IntegrityError(f"the manifest's {what!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _count(data: dict[str, Any], key: str) -> int:
    return _numbers([_get(data, key, int)], key)[0]


def _number(data: dict[str, Any], key: str) -> float:
    value = data.get(key)
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return _get(data, key, float)


def _numbers(values: Json, what: str) -> list[int]:
    if type(values) is not list or any(type(value) is not int or value < 0 for value in values):
        raise IntegrityError(f"the manifest's {what!r} must be whole numbers of at least 0")
    return values


def _compact(body: Json) -> str:
    return json.dumps(body, separators=(",", ":"))


def _check(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
