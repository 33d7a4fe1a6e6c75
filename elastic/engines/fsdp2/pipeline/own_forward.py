"""A model's own `forward`, called by each stage of a pipeline, of which it computes the stage's layers.

In the place of each named layer there is, for the time of a call, one that knows which it is. Layers of earlier stages
give NaN in the shape of what the stage before has sent, and NaN is what parameters are of layers that this rank has
not, and what passes leave on layers of other stages, so that what a model uses of them besides shows. (torch 2.13
multiplies by a matrix on the meta device without a word.) The stage's first layer gets what was sent in the place of
its first argument. The first layer of the next stage ends the call, and its first argument is what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.pipeline.layers import Absent, Cut, Row, parent_of
from elastic.engines.fsdp2.pipeline.passes import Arguments, Pass


class OwnForward:
    """In the place of a model's `forward`, like `Chain`. Each call is given the whole micro-batch."""

    def __init__(
        self, model: nn.Module, cut: Cut, device: torch.device, forward: Callable[..., Any], gives_loss: bool
    ) -> None:
        self._model, self._cut, self._device = model, cut, device
        self._forward, self._gives_loss = forward, gives_loss
        self._places = [parent_of(model, name) for name in cut.names]
        self._layers = [_found(parent, leaf) for parent, leaf in self._places]
        self._called: list[int] | None = None
        self._looked_at: set[int] = set()
        # What the model has asked for of other stages' layers and did not get, in this call.
        self._taken: list[str] = []
        self.stage = cut.stages[0]
        self.before: Callable[[int], None] | None = None
        # Of the call at hand.
        self._received: tuple[torch.Tensor, ...] = ()
        self._trains = False
        # Is NaN that shows now of another stage's layer? In each stage's first pass, until there is NaN of its own.
        self._finite = False

    @property
    def modules(self) -> list[nn.Module]:
        """The layers of the stage."""
        return [self._layers[number] for number in self._cut.layers_of(self.stage)]

    def given(self, now: Pass, received: tuple[torch.Tensor, ...]) -> Arguments:
        self._received, self._trains = received, now.step is not None
        return now.arguments(labels=self._gives_loss)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        own = self._cut.layers_of(self.stage)
        outside = [(name, self._model.get_buffer(name)) for name in self._cut.outside]
        versions = [buffer._version for _, buffer in outside]
        self._finite = self.stage not in self._looked_at and not _has_nan((inputs, named, self._received))
        with self._watched():
            try:
                output = self._forward(*inputs, **named)
            except _Reached as reached:
                output = reached.args[0]
            else:
                self._require_all(own, "the end of its forward")
                if own.stop < len(self._layers):
                    raise self._wrong(own.stop, "was not called by the model's forward")
                if self._gives_loss:
                    output = _loss_in(output, self._model)
            self._require_finite("the model's forward gives NaN", output)
        for (name, before), version in zip(outside, versions, strict=True):
            if self._model.get_buffer(name) is not before or before._version != version:
                raise UsageError(
                    f"the model's forward has changed the buffer {name!r}, which is of no layer of the pipeline: each "
                    "stage calls it, so that it would be changed several times; put it into a layer"
                )
        self._looked_at.add(self.stage)
        return output

    def reached(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any], part: str) -> Any:
        """The model calls a layer, or a `part` of one of another stage."""
        own, called = self._cut.layers_of(self.stage), self._called
        if part:
            raise self._wrong(number, f"is not called as a whole: {part.rstrip('.')!r} of it is; name what is called")
        if called is None:
            raise self._wrong(
                number,
                "is computed again outside of the model's forward: a checkpoint around its call is not supported; wrap "
                "the layer itself (checkpoint_wrapper, gradient_checkpointing_enable)",
            )
        if number in own:
            return self._compute(number, inputs, named, called)
        if number < own.start:
            if called:
                raise self._wrong(number, f"is called after {self._cut.names[called[-1]]!r}, which comes later")
            return _nothing(self._received[0])
        self._require_all(own, repr(self._cut.names[number]))
        if number not in self._next(own.stop):
            raise self._wrong(own.stop, f"was not called before {self._cut.names[number]!r}, which comes later")
        raise _Reached(self._sent(number, inputs, named))

    def has(self, number: int) -> bool:
        """Is the layer of the stage at hand?"""
        return number in self._cut.layers_of(self.stage)

    def taken(self, number: int, name: str, value: Any) -> Any:
        """What the model gets of a number of a layer of another stage: of a parameter that this rank has not, or of
        what a pass leaves there."""
        if not isinstance(value, torch.Tensor):
            self._taken.append(f"{self._cut.names[number]}.{name}")
            return math.nan
        if not value.dtype.is_floating_point and not value.is_complex():
            return value
        self._taken.append(f"{self._cut.names[number]}.{name}")
        return torch.full((), math.nan, device=self._device, dtype=value.dtype).expand(value.shape)

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._called, self._taken = [], []
        try:
            for number, (parent, leaf) in enumerate(self._places):
                parent._modules[leaf] = _Watched(self, number, self._layers[number])
            yield
        finally:
            for (parent, leaf), layer in zip(self._places, self._layers, strict=True):
                parent._modules[leaf] = layer
            self._called, self._received = None, ()

    def _compute(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any], called: list[int]) -> Any:
        if number in called:
            raise self._wrong(number, "is called twice in one pass; a layer is called once")
        if self._trains and not torch.is_grad_enabled():
            raise self._wrong(
                number,
                "is called without gradients: a checkpoint around its call is not supported; wrap the layer itself "
                "(checkpoint_wrapper, gradient_checkpointing_enable)",
            )
        if not called and self._received:
            inputs, named = _with_first(self._received[0], inputs, named)
            if self.stage not in self._looked_at:
                self._require_no_more(number, inputs, named)
        self._require_finite(f"layer {self._cut.names[number]!r} is called with NaN", (inputs, named))
        called.append(number)
        if self.before is not None:
            self.before(number)
        output = self._layers[number](*inputs, **named)
        self._finite = self._finite and not _has_nan(output)
        return output

    def _sent(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
        first, *others = (*inputs, *named.values()) or (None,)
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            raise self._wrong(
                number,
                f"begins a stage, and its first argument, which is what is sent, is a {_named(first)}; give it "
                "a tensor of floating numbers first, or let another layer begin it in elastic.Pipeline(begins=...)",
            )
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(others)):
            raise self._wrong(
                number,
                "begins a stage, and is given other tensors besides its first argument that have gradients: these do "
                "not travel from stage to stage; let another layer begin it in elastic.Pipeline(begins=...)",
            )
        self._require_finite(f"layer {self._cut.names[number]!r} is called with NaN", first)
        return first

    def _require_no_more(self, number: int, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        _, *others = (*inputs, *named.values())
        if _has_nan(others):
            raise self._wrong(
                number,
                "begins a stage, and is given other tensors besides its first argument that follow from layers of "
                "earlier stages (they have NaN here): let another layer begin it in elastic.Pipeline(begins=...)",
            )

    def _require_finite(self, what: str, values: Any) -> None:
        """Raises UsageError where these have NaN that is of another stage's layer: the model uses it."""
        if not self._finite or not _has_nan(values):
            return
        where = f"elastic.Pipeline(own_forward=True): {what} in stage {self.stage}"
        if self._taken:
            raise UsageError(
                f"{where}, and the model has asked for {', '.join(sorted(set(self._taken)))}, of layers of other "
                "stages. Let layers pass on what they compute for others; a head with the embedding's weight is a "
                "module that has the same parameter (head.weight = embed.weight), which is trained as one"
            )
        raise UsageError(
            f"{where}, which neither the stage before has sent nor a layer here has given: the model uses what a "
            "layer of another stage gives (a skip connection), and only what a stage's first layer is called with "
            "travels. Let layers pass it on, or keep them in one stage (elastic.Pipeline(begins=...))"
        )

    def _next(self, begin: int) -> Sequence[int]:
        """The layers that stay with this one, and so may be called first."""
        first = 0
        for names in self._cut.row:
            if first == begin:
                return range(begin, begin + len(names))
            first += len(names)
        return ()

    def _require_all(self, own: Sequence[int], what: str) -> None:
        missing = next((number for number in own if number not in (self._called or ())), None)
        if missing is not None:
            raise self._wrong(missing, f"was not called before {what}: the model's forward calls each layer once")

    def _wrong(self, number: int, what: str) -> UsageError:
        return UsageError(f"elastic.Pipeline(own_forward=True): layer {self._cut.names[number]!r} {what}")


def require_callable(model: nn.Module, row: Row) -> None:
    """Raises UsageError for a model whose own forward cannot be called in parts."""
    parents = {parent_of(model, name)[0] for names in row for name in names}
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules
        if compiled and not parents.isdisjoint(module.modules()):
            raise UsageError(
                f"elastic.Pipeline(own_forward=True): {name or 'the model'} is compiled as a whole, and its layers are "
                "called one by one: compile the layers"
            )
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            raise UsageError(
                f"elastic.Pipeline(own_forward=True): {name or 'the model'} has output_router_logits, of which a stage "
                "would have those of its own layers; set it to False, and let the layers themselves pass on what their "
                "routers say"
            )


class _Reached(BaseException):
    """The first layer of the next stage is called, with this. No error: `except Exception` lets it pass."""


class _Watched(nn.Module):
    """In the place of a layer, or of a part of one of another stage. What else is asked of it is the layer's."""

    def __init__(self, forward: OwnForward, number: int, layer: nn.Module, part: str = "") -> None:
        super().__init__()
        self.training = layer.training
        # In a tuple it is no part of this module.
        self.elastic_watched = (forward, number, layer, part)

    def __getattr__(self, name: str) -> Any:
        forward, number, layer, part = self.__dict__["elastic_watched"]
        # What it shares with a layer that is here, it has in its place.
        elsewhere = isinstance(layer, Absent) and layer.elastic_layer and name not in layer._parameters
        source = layer.elastic_layer[0] if elsewhere else layer
        found = getattr(source, name)
        if forward.has(number):
            return found
        if isinstance(found, nn.Module):
            return _Watched(forward, number, found, f"{part}{name}.")
        left_there = isinstance(found, (torch.Tensor, float)) and name in vars(source)
        absent = isinstance(found, torch.Tensor) and found.is_meta
        return forward.taken(number, part + name, found) if left_there or absent else found

    def forward(self, *inputs: Any, **named: Any) -> Any:
        forward, number, _, part = self.elastic_watched
        return forward.reached(number, inputs, named, part)


def _has_nan(values: Any) -> bool:
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.is_floating_point())
    return any(bool(each.isnan().any()) for each in tensors)


def _found(parent: nn.Module, leaf: str) -> nn.Module:
    found = parent._modules[leaf]
    assert found is not None
    return found


def _nothing(like: torch.Tensor) -> torch.Tensor:
    return like.new_full((), float("nan")).expand(like.shape)


def _with_first(
    first: torch.Tensor, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs:
        return (first, *inputs[1:]), named
    return (), {**named, next(iter(named)): first}


def _loss_in(output: Any, model: nn.Module) -> torch.Tensor:
    found = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", output)
    if isinstance(found, (tuple, list)):
        numbers = [each for each in found if isinstance(each, torch.Tensor) and each.numel() == 1]
        found = numbers[0] if len(numbers) == 1 else found
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise UsageError(
            f"elastic.Pipeline has no loss_fn, and {type(model).__name__} gives no mean loss (a number, `.loss`, or a "
            "tuple with one number): give loss_fn, or batches with labels"
        )
    return found


def _named(value: Any) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
