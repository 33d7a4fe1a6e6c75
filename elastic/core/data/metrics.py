"""Metrics of the training function: checked and converted where the user hands them over.

What passes here can be sent, joined over ranks and written to the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.errors import UsageError

_MOST_CHARACTERS = 10_000
_MOST_ITEMS = 10_000
_MOST_LEVELS = 8


def plain(name: str, value: Any, level: int = 0) -> Any:
    """The value in JSON's types: bool, int of 64 bits, float, text, None, and lists and mappings of these.

    Tensors and arrays of one element become their number (`value.item()`, which waits for the device). Non-finite
    floats stay: the journal writes null for them. Raises UsageError naming the metric for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _checked_int(name, int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return _checked_text(name, str(value))
    if level < _MOST_LEVELS and isinstance(value, Mapping) and len(value) <= _MOST_ITEMS:
        return {_checked_text(name, str(key)): plain(name, item, level + 1) for key, item in value.items()}
    if level < _MOST_LEVELS and isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        return [plain(name, item, level + 1) for item in value]
    return plain(name, _one_number(name, value), level + 1)


def _one_number(name: str, value: Any) -> bool | int | float:
    """Of a tensor, an array or a numpy scalar; recognised by their methods, since the core imports neither library."""
    what = f"elastic.report: the metric {name!r} is a {type(value).__module__}.{type(value).__name__}"
    shape = tuple(getattr(value, "shape", ()))
    if any(size != 1 for size in shape):
        raise UsageError(f"{what} of shape {shape}; report a number, for example its mean")
    if not hasattr(value, "item"):
        raise UsageError(f"{what}, which cannot be written; report numbers, text, or lists and mappings of these")
    try:
        number = value.item()
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{what} without a value: {error}") from error
    if not isinstance(number, bool | int | float):
        raise UsageError(f"{what} whose value is a {type(number).__name__}; report a real number")
    return number


def _checked_int(name: str, value: int) -> int:
    if not -(2**63) <= value < 2**64:
        raise UsageError(f"elastic.report: the metric {name!r} is an integer of more than 64 bits")
    return value


def _checked_text(name: str, value: str) -> str:
    if len(value) > _MOST_CHARACTERS:
        raise UsageError(f"elastic.report: the metric {name!r} is a text of {len(value)} characters (at most 10000)")
    # Half a surrogate pair cannot be sent as UTF-8.
    return value.encode("utf-8", "backslashreplace").decode()
