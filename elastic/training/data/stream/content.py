"""Hashes of samples: what proves that a stream gave the same content again.

Positions prove nothing about a stream: a reader that lost its place counts on. So each reader chains the hashes of its
samples, and each step has the sum of its readers' chains, whatever the world size.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from elastic.core.data.readers import MODULUS
from elastic.core.errors import UsageError

_NUMBERS: dict[type, str] = {int: "int64", float: "float64"}


def content_hash(value: Any, strict: bool = True) -> int:
    """A 64-bit hash (xxh3) of a sample's content: tensors, arrays, numbers, text, bytes, None, images, and lists,
    tuples, mappings and dataclasses of these. Equal on every machine; depends on types, shapes and order of keys.

    Raises UsageError for an object whose content cannot be seen; without `strict` its type alone counts.
    """
    digest = xxhash.xxh3_64()
    _feed(digest, value, strict)
    return digest.intdigest()


def chained(chain: int, content: int) -> int:
    """The chain of a reader after one more sample."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", chain, content))


def reader_sum(reader: int, count: int, chain: int) -> int:
    """What a reader that has read `count` samples adds to its step's sum, modulo 2**64."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQ", reader, count, chain)) % MODULUS


def _feed(digest: xxhash.xxh3_64, value: Any, strict: bool) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        _tag(digest, "tensor", str(value.dtype), tuple(value.shape))
        digest.update(value.view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        _tag(digest, "array", value.dtype.str, value.shape)
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, str | bytes | bytearray | memoryview):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        _tag(digest, "text" if isinstance(value, str) else "bytes", len(data))
        digest.update(data)
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        _tag(digest, type(value).__name__, repr(value))
    elif isinstance(value, Mapping):
        _tag(digest, "mapping", len(value))
        for key, item in value.items():
            _feed(digest, key, strict)
            _feed(digest, item, strict)
    elif isinstance(value, list | tuple | np.ndarray):
        # One by one, the token ids of a document would take longer than everything else together.
        numbers = _NUMBERS.get(type(value[0])) if len(value) and len(set(map(type, value))) == 1 else None
        try:
            packed = None if numbers is None else np.array(value, numbers).tobytes()
        except OverflowError:
            packed = None
        _tag(digest, "list" if packed is None else numbers, len(value))
        if packed is not None:
            digest.update(packed)
            return
        for item in value:
            _feed(digest, item, strict)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, strict)
    elif hasattr(value, "tobytes"):
        # Images of PIL.
        _tag(digest, type(value).__name__, getattr(value, "mode", ""), getattr(value, "size", ""))
        digest.update(value.tobytes())
    else:
        if strict:
            raise UsageError(
                f"a sample of the stream holds a {type(value).__module__}.{type(value).__qualname__}, whose content "
                "cannot be compared when it is read again; turn it into tensors, arrays, numbers, text or bytes in "
                "transform="
            )
        _tag(digest, "object", type(value).__qualname__)


def _tag(digest: xxhash.xxh3_64, *parts: object) -> None:
    digest.update(("\x1f".join(map(str, parts)) + "\x1e").encode())
