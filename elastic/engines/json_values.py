"""Small Python values as strict JSON and back: the content of schedulers, parameter groups and optimizer scalars.

JSON has no tuples, no infinity, no integer keys and no tensors, and torch's schedulers have all of them (MultiStepLR
counts by integer, ReduceLROnPlateau starts at infinity). They become objects with one key that begins with "$".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import UsageError

# What extra state of modules may hold; anything larger is a buffer.
_MOST_ELEMENTS = 4096


# (value, where) -> its JSON, an object with one key that begins with "$"; None where it has no answer.
EncodeLeaf = Callable[[Any, str], Json | None]
# (that key, its value) -> the value.
DecodeLeaf = Callable[[str, Json], Any]


def encode(value: Any, where: str, leaf: EncodeLeaf | None = None) -> Json:
    """JSON for `value`; `leaf` is asked first, for every value.

    Raises UsageError naming `where` and the path below it for what is not plain data.
    """
    if leaf is not None and (found := leaf(value, where)) is not None:
        return found
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST_ELEMENTS:
        dtype = str(value.dtype).removeprefix("torch.")
        item = encode(value.detach().reshape(() if value.numel() == 1 else (-1,)).tolist(), where)
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "value": item}}
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]", leaf) for index, item in enumerate(value)]
    if isinstance(value, tuple) and type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}[{index}]", leaf) for index, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where, leaf)
    raise UsageError(
        f"{where} is a {type(value).__qualname__}, which cannot be written as JSON: a checkpoint carries numbers, "
        "texts, lists and dicts only"
    )


def decode(value: Json, leaf: DecodeLeaf | None = None) -> Any:
    """The inverse of `encode`; every call makes new objects."""
    if isinstance(value, list):
        return [decode(item, leaf) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$float", text)]:
            return float(text)
        case [("$tuple", items)]:
            return tuple(decode(item, leaf) for item in items)
        case [("$items", items)]:
            return {decode(key): decode(item, leaf) for key, item in items}
        case [("$counter", items)]:
            return Counter({decode(key): decode(item) for key, item in items})
        case [("$tensor", {"dtype": dtype, "shape": shape, "value": item})]:
            return torch.tensor(decode(item), dtype=getattr(torch, dtype)).reshape(shape)
        case [(key, body)] if leaf is not None and key.startswith("$"):
            return leaf(key, body)
    return {key: decode(item, leaf) for key, item in value.items()}


def _encode_dict(value: dict[Any, Any], where: str, leaf: EncodeLeaf | None) -> Json:
    items = [[encode(key, where), encode(item, f"{where}.{key}", leaf)] for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": items}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {"$items": items}
