"""The training function's own objects: what it holds when its first batch is asked for, by the names that it uses.

Looked at once per generation, to keep schedulers that nobody registered and to name what is not kept.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# Packages whose frames and objects are not the user's.
_NOT_THE_USERS = frozenset({"elastic", "torch", "deepspeed", "tqdm", "ray", "numpy"})
# It calls the training function.
_RUNNER = "elastic.training.loop"
# Levels below a variable: self.trainer.scheduler.
_DEPTH = 2
# Items of a list, entries of a dict, attributes of an object: no more of them are looked at.
_MOST_ITEMS = 64
DATASET = "dataset"
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def visible(dataset: Any) -> dict[str, Any]:
    """Name -> object: local variables of the user's functions that are running, and what they hold two levels below;
    random generators among the globals of those functions; what `dataset` and the datasets that it wraps hold."""
    found: dict[str, Any] = {}
    name = DATASET
    while dataset is not None and not _is(dataset, torch.Tensor):
        _note(found, name, dataset, depth=1)
        dataset, name = _attribute(dataset, "dataset"), f"{name}.dataset"
    for frame in _users_frames():
        function = frame.f_code.co_flags & inspect.CO_NEWLOCALS
        for name, value in (dict(frame.f_locals) if function else {}).items():
            _note(found, name, value, _DEPTH)
        for name, value in list(frame.f_globals.items()):
            if _is(value, _GENERATORS):
                found.setdefault(name, value)
        if function and isinstance(frame.f_locals, dict):
            # Python's copy of the variables: it would keep what they hold alive.
            frame.f_locals.clear()
    return found


def schedulers(objects: Mapping[str, Any], groups: Collection[int], known: Collection[int]) -> dict[str, Any]:
    """Those with a state of their own whose optimizer has one of the parameter groups with these ids, without `known`
    ids; each under its first name."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        own = _attribute(_attribute(value, "optimizer"), "param_groups")
        if id(value) in known or not _is(own, list) or not {id(group) for group in own} & set(groups):
            continue
        sets_rates = any(callable(_attribute(value, name)) for name in ("get_last_lr", "get_lr"))
        if sets_rates and _keeps_state(value) and all(value is not other for other in found.values()):
            found[name] = value
    return found


def not_kept(objects: Mapping[str, Any], known: Collection[int]) -> dict[str, str]:
    """Name -> kind, of random generators and of what has a state_dict to keep, without `known` ids."""
    found: dict[str, str] = {}
    seen = set(known)
    for name, value in objects.items():
        if id(value) not in seen and (_is(value, _GENERATORS) or _keeps_state(value)):
            seen.add(id(value))
            found[name] = type(value).__qualname__
    return found


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Not `isinstance`, which asks a proxy for the class of what it stands for."""
    return issubclass(type(value), kinds)


def _keeps_state(value: Any) -> bool:
    if _is(value, torch.nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    own = not _is(value, type)
    return own and all(callable(_attribute(value, name)) for name in ("state_dict", "load_state_dict"))


def _attribute(value: Any, name: str) -> Any:
    """None where there is none, or where a property of the user's fails."""
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - it is only looked at
        return None


def _users_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == _RUNNER:
            return
        if module.partition(".")[0] not in _NOT_THE_USERS:
            yield frame
        frame = frame.f_back


def _note(found: dict[str, Any], name: str, value: Any, depth: int) -> None:
    if _is(value, (ModuleType, str, bytes, int, float)) or value is None:
        return
    found.setdefault(name, value)
    if depth == 0:
        return
    try:
        held = _held(value)
    except Exception as error:  # noqa: BLE001 - it is only looked at
        logger.debug("%s (%s) was not looked into: %s", name, type(value).__qualname__, error)
        return
    for below, item in held:
        _note(found, f"{name}{below}", item, depth - 1)


def _held(value: Any) -> list[tuple[str, Any]]:
    """What `value` holds, without running code of it."""
    if _is(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value[:_MOST_ITEMS])]
    if _is(value, dict):
        entries = list(value.items()) if len(value) <= _MOST_ITEMS else []
        return [(f"[{key!r}]", item) for key, item in entries if _is(key, str)]
    opaque = _is(value, (type, torch.nn.Module)) or type(value).__module__.partition(".")[0] in _NOT_THE_USERS
    if opaque:
        return []
    try:
        # Not `getattr`: a bound method answers for its function, other objects for what they wrap.
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [(f".{key}", item) for key, item in list(attributes.items())[:_MOST_ITEMS]]
