"""Early imports of what DeepSpeed imports at its first engine, without compiling unused functions."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from elastic.engines import build_lock

logger = logging.getLogger(__name__)

# DeepSpeed and torch import these at the first engine or optimizer only; with their dependencies some 750 modules.
_IMPORTED_LATE = (
    "torch._dynamo",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_comm",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)


def warm_up() -> None:
    import deepspeed

    preload()
    build_lock.install()
    # Its first use probes every operator; the shared-memory one compiles for about a minute and serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def preload() -> None:
    """Imports only: operators are not probed, for which DeepSpeed would use the device."""
    with _compiled_at_first_use():
        for name in _IMPORTED_LATE:
            try:
                importlib.import_module(name)
            except ImportError as error:
                logger.debug("%s does not exist and is not imported early: %s", name, error)


@contextmanager
def named_by_shape() -> Iterator[None]:
    """Stage 3 formats a message of all its arguments, which it then does not print: the values of every parameter among
    them, half of the time that the engine takes, and on a device a copy to the host for each."""
    original = torch.nn.Parameter.__repr__
    torch.nn.Parameter.__repr__ = _shape  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.nn.Parameter.__repr__ = original  # type: ignore[assignment, method-assign]


@contextmanager
def nothing_walked() -> Iterator[None]:
    """Stage 3 collects garbage while it is built, for memory in one piece: 0.1 s for a million of the user's objects,
    in every recovery. What it frees there is in no cycle. Release 0.19.8: `defragment` in zero/utils.py."""
    from deepspeed.runtime.zero import utils

    original, utils.gc = utils.gc, SimpleNamespace(collect=lambda: 0)
    try:
        yield
    finally:
        utils.gc = original


def _shape(parameter: torch.nn.Parameter) -> str:
    return f"Parameter of {tuple(parameter.shape)}"


@contextmanager
def values_come_later() -> Iterator[None]:
    """For an engine that a restore follows, which sets the values of all parameters.

    While DeepSpeed builds it, it sends each of them from rank 0 to all, twice in stage 3, which then gathers it as well
    to find its place in the graph: a collective after the other for values that nobody reads. None is made meanwhile.
    Release 0.19.8: `_broadcast_model` in engine.py, `_zero_init_param` in partition_parameters.py,
    `create_reduce_and_remove_grad_hooks` in stage3.py.
    """
    from deepspeed import comm

    names = ("broadcast", "all_gather_into_tensor", "all_gather")
    originals = {name: getattr(comm, name) for name in names}
    for name in names:
        setattr(comm, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(comm, name, original)


@contextmanager
def _compiled_at_first_use() -> Iterator[None]:
    """DeepSpeed's Muon calls torch.compile while it is imported, which loads the whole compiler: 0.8 s of CPU in every
    process, whatever its optimizer. Here functions are compiled when the first of them is called."""
    from deepspeed.runtime import compiler

    original = compiler.compile
    later: list[_Later] = []

    def compile_later(*args: Any, **kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            made = _Later(function, original(*args, **kwargs), later)
            later.append(made)
            return made.stand_in

        return decorate

    compiler.compile = compile_later
    try:
        yield
    finally:
        compiler.compile = original


class _Later:
    """A function of a module that is to be compiled. `stand_in` has its place until one of `others` is called: then all
    are compiled and take their places, for the compiler would go through stand-ins that they call."""

    def __init__(
        self, function: Callable[..., Any], decorate: Callable[[Any], Callable[..., Any]], others: list[_Later]
    ) -> None:
        self._function, self._decorate, self._others = function, decorate, others
        self._compiled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def stand_in(*values: Any, **named: Any) -> Any:
            while others:
                others.pop().compile()
            assert self._compiled is not None
            return self._compiled(*values, **named)

        self.stand_in = stand_in

    def compile(self) -> None:
        self._compiled = self._decorate(self._function)
        place = sys.modules[self._function.__module__]
        if getattr(place, self._function.__name__, None) is self.stand_in:
            setattr(place, self._function.__name__, self._compiled)
