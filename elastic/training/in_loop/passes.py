"""What the forward passes of training look like, told to workers that join: each makes such passes ahead of joining.

A pass is described as JSON: the arguments of the model as nested lists and mappings, in which a tensor is its shape,
strides, type and kind of device, and the types in which the model computes (`engines.model.precision`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic.core.checkpoint.manifest import Json
from elastic.engines.base import Engine
from elastic.engines.model.compiled import graphs
from elastic.engines.model.precision import Precision
from elastic.training.scope import GenerationScope

# Of a process's first steps: batches of two lengths, and torch compiles for any.
_STEPS = 3
_MOST = 4
# In steps; fewer than the outbox keeps of what a restarted controller lacks.
_AGAIN = 500


class PassLog:
    """The different passes of this process's first steps. Rank 0 tells them, where torch.compile has made graphs of
    them; now and then again, for a controller that was restarted."""

    def __init__(self) -> None:
        self._seen: list[Json] = []
        self._steps = 0
        self._told = 0

    def note(self, engine: Engine, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Before a forward pass of training."""
        if self._steps >= _STEPS or len(self._seen) >= _MOST:
            return
        precision = engine.precision()
        if precision is None:
            return
        try:
            seen = describe(inputs, named, precision, engine.module, engine.device.type)
        except TypeError:
            # Arguments of a class of the user's own: nobody else can make them.
            return
        if seen not in self._seen:
            self._seen.append(seen)

    def step_finished(self, scope: GenerationScope) -> None:
        self._steps += 1
        spec = scope.spec
        new = self._told != spec.generation or self._steps == _STEPS or self._steps % _AGAIN == 0
        if new and spec.rank == 0 and spec.mesh.dp == spec.world_size and self._seen and graphs():
            self._told = spec.generation
            scope.coordinator.passes(self._seen)


def describe(
    inputs: Sequence[Any], named: Mapping[str, Any], precision: Precision, module: torch.nn.Module, device: str
) -> Json:
    """Of a pass that `module` is about to make. Raises TypeError for arguments that JSON cannot describe."""
    autocast = precision.autocast
    if autocast is None and torch.is_autocast_enabled(device):
        # The script's own.
        autocast = torch.get_autocast_dtype(device)
    return {
        "inputs": [_described(value) for value in inputs],
        "named": {name: _described(value) for name, value in named.items()},
        "weights": _name(precision.weights),
        "others": {name: _name(dtype) for name, dtype in precision.others.items()},
        "autocast": None if autocast is None else _name(autocast),
        "casts_inputs": precision.casts_inputs,
        "by_engine": precision.by_engine,
        "evaluates": [name for name, part in module.named_modules() if not part.training],
        "device": device,
    }


def precision_of(described: Mapping[str, Any]) -> Precision:
    others = {name: dtype_of(dtype) for name, dtype in described["others"].items()}
    autocast = described["autocast"]
    return Precision(
        dtype_of(described["weights"]),
        others,
        None if autocast is None else dtype_of(autocast),
        described["casts_inputs"],
        described["by_engine"],
    )


def arguments_of(described: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a pass, of zeros, in new tensors."""
    inputs = [_made(value) for value in described["inputs"]]
    return inputs, {name: _made(value) for name, value in described["named"].items()}


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no type {name!r}")
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> Json:
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return {
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "type": _name(value.dtype),
            "device": value.device.type,
            "trained": value.requires_grad,
        }
    if type(value) in (list, tuple):
        return {type(value).__name__: [_described(item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _described(item) for key, item in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(f"{type(value).__qualname__} is not described")


_MAKES: dict[str, Callable[[Any], Any]] = {
    "list": lambda items: [_made(item) for item in items],
    "tuple": lambda items: tuple(_made(item) for item in items),
    "dict": lambda items: {key: _made(item) for key, item in items.items()},
    "value": lambda value: value,
}


def _made(described: Any) -> Any:
    if "shape" not in described:
        ((kind, value),) = described.items()
        return _MAKES[kind](value)
    made = torch.empty_strided(
        described["shape"], described["strides"], dtype=dtype_of(described["type"]), device=described["device"]
    ).zero_()
    return made.requires_grad_(described["trained"])
