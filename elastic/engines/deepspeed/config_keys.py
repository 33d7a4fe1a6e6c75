"""Keys of a DeepSpeed configuration that DeepSpeed would never read: it ignores most of them without a word.

`config_keys.json` is written by `tests/tensors/deepspeed_config_keys.py` from DeepSpeed's own models and parsing, and a
test holds it to them. It is a file because the checks of a job must not wait for DeepSpeed (and torch) to be imported.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.nearest import Keys, nearest_key
from elastic.engines.deepspeed.refused import ALWAYS_REFUSED

# In `config_keys.json` the parameters of each optimizer and scheduler stand under this key.
_BY_TYPE = "?"


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise UsageError for the first key, type or parameter that DeepSpeed does not know; the message names the
    nearest valid one."""
    known, sections = _known()
    _check_keys(config, known, (), sections)
    for section in ("optimizer", "scheduler"):
        chosen = config.get(section)
        if isinstance(chosen, Mapping):
            _check_type(section, chosen, known[section]["params"][_BY_TYPE])


def _check_keys(config: Mapping[str, Any], known: Mapping[str, Any], path: tuple[str, ...], sections: Keys) -> None:
    for key, value in config.items():
        here = (*path, str(key))
        if key not in known:
            raise UsageError(f"DeepSpeed has no option {'.'.join(here)!r}; {nearest_key(str(key), path, sections)}")
        below = known[key]
        if below is not None and _BY_TYPE not in below and isinstance(value, Mapping):
            _check_keys(value, below, here, sections)


def _check_type(section: str, chosen: Mapping[str, Any], types: Mapping[str, list[str] | None]) -> None:
    """DeepSpeed takes its own optimizers in any case of letters, torch's and the schedulers by their exact names."""
    kind, parameters = chosen.get("type"), chosen.get("params")
    if not isinstance(kind, str):
        return
    name = kind.lower() if kind.lower() in types else kind
    if name not in types:
        # "AdamW" before "adamw": that is how it is written.
        by_lower = {valid.lower(): valid for valid in sorted(types, reverse=True)}
        near = difflib.get_close_matches(kind.lower(), by_lower, n=1, cutoff=0.0)[0]
        raise UsageError(f"DeepSpeed option {section}.type: unknown {kind!r}; did you mean {by_lower[near]!r}?")
    names = types[name]
    if names is None or not isinstance(parameters, Mapping):
        return
    for key in parameters:
        if key not in names:
            near_key = nearest_key(str(key), (), {(): names})
            raise UsageError(f"DeepSpeed option {section}.params: {kind} has no parameter {key!r}; {near_key}")


@lru_cache(maxsize=1)
def _known() -> tuple[Mapping[str, Any], Keys]:
    known = json.loads(resources.files(__package__).joinpath("config_keys.json").read_text(encoding="utf-8"))
    sections: dict[tuple[str, ...], list[str]] = {}
    _collect(known, (), sections)
    return known, sections


def _collect(known: Mapping[str, Any], path: tuple[str, ...], sections: dict[tuple[str, ...], list[str]]) -> None:
    """Refused options are no suggestions."""
    sections[path] = [key for key in known if ".".join((*path, key)) not in ALWAYS_REFUSED]
    for key, below in known.items():
        if isinstance(below, dict) and _BY_TYPE not in below:
            _collect(below, (*path, key), sections)
