"""An engine's configuration as users give it: a mapping, or the path of a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from elastic.core.errors import UsageError


def read_mapping(config: Mapping[str, Any] | str | os.PathLike[str], what: str) -> Mapping[str, Any]:
    """`what`: its name in errors, such as "DeepSpeed configuration". Raises UsageError for what is neither, for a file
    that cannot be read, and for a key that is given twice."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise UsageError(f"config must be a {what} or the path of one, not {type(config).__name__}")
    try:
        with open(config, encoding="utf-8") as file:
            read = json.load(file, object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UsageError(f"the {what} {config} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the {what} {config} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"the {what} {config} must be a JSON object")
    return read


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON would keep the last value without a word."""
    read = dict(pairs)
    if len(read) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return read
