"""What a training function makes once for each process, however often it is called: `elastic.keep`."""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic.core.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    value: Any


_kept: dict[Any, list[_Kept]] = {}


def keep(make: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """`make(*arguments, **named)`; the same object again for the same function and equal arguments.

    Raises UsageError for a function whose result depends on more than its arguments (a closure), for arguments that
    cannot be compared, and for a result that an engine changes.
    """
    made = _kept.setdefault(_key(make), [])
    for kept in made:
        if _equal((kept.arguments, kept.named), (arguments, named), make):
            return kept.value
    try:
        # Compared later: the caller may change what it has passed.
        before = copy.deepcopy((arguments, named))
    except Exception as error:
        raise UsageError(f"elastic.keep({_name(make)}, ...): the arguments cannot be copied: {error}") from error
    began = time.monotonic()
    value = make(*arguments, **named)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        raise UsageError(
            f"elastic.keep({_name(make)}, ...) returned a {type(value).__name__}: models and optimizers are changed by "
            "their engine and are built anew; keep what they are built from"
        )
    logger.info("%s is kept: it took %.1f s", _name(make), time.monotonic() - began)
    made.append(_Kept(*before, value))
    return value


def _key(make: Callable[..., Any]) -> Any:
    """A function that is defined inside of the training function is a new object at every call, with the same code."""
    if not inspect.isfunction(make):
        return make
    if make.__closure__:
        names = ", ".join(make.__code__.co_freevars)
        raise UsageError(
            f"elastic.keep({_name(make)}, ...): the function uses {names} of the function around it; pass them as "
            "arguments, so that a change of them is seen"
        )
    return make.__code__


def _equal(left: Any, right: Any, make: Callable[..., Any]) -> bool:
    try:
        return bool(left == right)
    except Exception as error:
        raise UsageError(f"elastic.keep({_name(make)}, ...): the arguments cannot be compared: {error}") from error


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__qualname__", type(make).__qualname__)
