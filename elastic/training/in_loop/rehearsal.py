"""Before a worker joins, its model makes the passes of the others' training, of zeros: what torch.compile makes of
them, and what else comes with a first pass, is there when the others pause for it.

It is the model alone that computes, as the engine will have it do: no engine, no group, no code of the loop. Nothing of
it is kept but what is compiled: weights, buffers, gradients, training modes and random streams are as they were.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from elastic.core.errors import UsageError
from elastic.engines.base import Engine
from elastic.engines.model.compiled import graphs
from elastic.engines.model.precision import Precision, floating
from elastic.training import context
from elastic.training.in_loop.passes import arguments_of, precision_of

logger = logging.getLogger(__name__)

_COPIED = (list, dict, set)
# What the first leaves in the model, a cache, say, may change what the second does.
_TIMES = 2


class NoRoom(UsageError):
    """No engine was built for the passes."""


class Rehearsal:
    """`passes` asks for what there is to rehearse, of which there may be nothing yet; `tell` is given what came of it.
    `engine`: one on the model, for passes that are an engine's.

    Call it as often as there is time, until it is `over`. Raises UsageError where it cannot give the model back."""

    def __init__(
        self,
        model: Any,
        passes: Callable[[], Sequence[Any]],
        tell: Callable[[str], None],
        engine: Callable[[], AbstractContextManager[Engine]] | None = None,
    ) -> None:
        self._model = model
        self._passes = passes
        self._tell = tell
        self._engine = engine
        self._by_engine = False
        self.over = not _is_rehearsed(model)

    def __call__(self) -> None:
        if self.over or not (passes := self._passes()):
            return
        self.over, begun, before = True, time.monotonic(), graphs()
        context.await_with(_refuse)
        try:
            self._make(passes)
            many = f"{len(passes)} forward and backward pass{'es' if len(passes) > 1 else ''} of zeros"
            told = f"made {many} ahead of joining, in {time.monotonic() - begun:.1f} s; graphs: {graphs() - before}"
        except Exception as error:
            logger.warning("the model's passes could not be made ahead of joining", exc_info=True)
            told = f"could not make a pass ahead of joining ({type(error).__name__}: {error}): its first step does"
            if self._built and not isinstance(error, NoRoom):
                self._tell(told)
                raise UsageError(f"its model is not given back after that: {told}") from error
        finally:
            context.await_with(None)
        self._tell(told)

    @property
    def _built(self) -> bool:
        return self._engine is not None and self._by_engine

    def _make(self, passes: Sequence[Any]) -> None:
        self._by_engine = any(described["by_engine"] for described in passes)
        if not self._by_engine:
            for described in passes:
                make_pass(self._model, described)
            return
        if self._engine is None:
            raise NoRoom("there is no engine of one worker")
        with _keeping(self._model), self._engine() as engine:
            for described in passes:
                make_engines_pass(engine, described)


def _refuse() -> None:
    """A model that asks for its generation would begin one of its own, as a script does outside of a run."""
    raise UsageError("the model asks for its generation, which has not begun")


def make_pass(model: nn.Module, described: Mapping[str, Any]) -> None:
    """A forward and a backward pass, and once more. Raises what the model raises."""
    precision, (inputs, named) = precision_of(described), arguments_of(described)
    if precision.casts_inputs:
        inputs, named = tree_map(lambda value: _cast(value, precision.weights), (inputs, named))
    with ExitStack() as around:
        around.enter_context(_keeping(model, precision, described["device"]))
        _set_modes(model, described)
        if precision.autocast is not None:
            around.enter_context(torch.autocast(described["device"], precision.autocast))
        for _ in range(_TIMES):
            if trained := _trained(model(*inputs, **named)):
                torch.autograd.backward(trained, [torch.zeros_like(leaf) for leaf in trained])


def make_engines_pass(engine: Engine, described: Mapping[str, Any]) -> None:
    """The same by an engine, which casts by itself. Its gradients are never used."""
    inputs, named = arguments_of(described)
    _set_modes(engine.module, described)
    for _ in range(_TIMES):
        if trained := _trained(engine.forward(inputs, named, True)):
            engine.backward(torch.stack([leaf.float().sum() for leaf in trained]).sum(), {})


def _set_modes(model: nn.Module, described: Mapping[str, Any]) -> None:
    evaluates = set(described["evaluates"])
    for name, module in model.named_modules():
        module.training = name not in evaluates


def _trained(output: Any) -> list[torch.Tensor]:
    """What a backward pass may begin at."""
    return [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.requires_grad]


@contextmanager
def _keeping(model: nn.Module, precision: Precision | None = None, device: str | None = None) -> Iterator[None]:
    """Within it the model's weights are of these types and on the device, where these are given; afterwards everything
    is as it was."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    types = {} if precision is None else {id(each): precision.type_of(name) for name, each in floating(model).items()}
    data = [(tensor, tensor.data, tensor.grad) for tensor in every.values()]
    buffers = [(kept.data, kept.detach().clone()) for kept in model.buffers()]
    attributes = [_Attributes(module) for module in model.modules()]
    streams = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            for tensor, held, _ in data:
                tensor.grad = None
                tensor.data = held.to(device or held.device, types.get(id(tensor), held.dtype))
            yield
        finally:
            for kept in attributes:
                kept.give_back()
            for tensor, held, gradient in data:
                tensor.grad = None
                tensor.data = held
                tensor.grad = gradient
            for held, content in buffers:
                # Some are views in which an element is at several places, and cannot be written to.
                if not torch.equal(held, content):
                    held.copy_(content)
            random.setstate(streams[0])
            np.random.set_state(streams[1])


class _Attributes:
    """What a module has, and what is in its lists and the like: an auxiliary loss that a pass appends is none of the
    first step's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._values = dict(vars(module))
        self._contents = [(value, copy(value)) for value in self._values.values() if type(value) in _COPIED]

    def give_back(self) -> None:
        for value, content in self._contents:
            value.clear()
            getattr(value, "extend" if type(value) is list else "update")(content)
        now = vars(self._module)
        for name in [name for name in now if name not in self._values]:
            del now[name]
        for name, value in self._values.items():
            if now.get(name, self) is not value:
                now[name] = value


def _is_rehearsed(model: Any) -> bool:
    """Its weights are here, and whole."""
    if not isinstance(model, nn.Module):
        return False
    every = (*model.parameters(), *model.buffers())
    return not any(is_lazy(tensor) or tensor.is_meta or type(tensor.data) is not torch.Tensor for tensor in every)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
