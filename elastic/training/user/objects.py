"""State of the user's own objects as JSON and tensors, and back: never pickled, so nothing in storage can run code.

An object has `state_dict` and `load_state_dict`, or is a random generator of torch, numpy or Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic.checkpoint.shards import check_dtype
from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import UsageError
from elastic.engines.json_values import decode, encode

_TENSOR, _ARRAY = "$kept_tensor", "$kept_array"


@dataclass(frozen=True)
class ObjectState:
    """`values` is JSON in which each tensor is a reference to one of `tensors`, by its number."""

    kind: str
    values: Json
    tensors: tuple[torch.Tensor, ...]


def read(name: str, target: Any) -> ObjectState:
    """The state of `target` now; tensors are live, not copies. Raises UsageError naming what cannot be kept."""
    what, tensors = f"the state of {name!r}", list[torch.Tensor]()
    get, _ = access(name, target)
    values = encode(get(), what, lambda value, where: _reference(value, where, tensors))
    return ObjectState(kind_of(target), values, tuple(tensors))


def install(name: str, target: Any, saved: ObjectState, device: torch.device) -> None:
    """Give `target` the state that `read` found; its tensors on the kind of device that they were on. Raises UsageError
    where the object is of another kind, or does not take the state."""
    if saved.kind != kind_of(target):
        raise UsageError(
            f"the checkpoint has the state of a {saved.kind} under {name!r}, and a {kind_of(target)} is registered now"
        )
    state = decode(saved.values, lambda kind, body: _resolved(kind, body, saved.tensors, device))
    try:
        access(name, target)[1](state)
    except Exception as error:
        raise UsageError(f"{name!r} ({saved.kind}) does not take its state from the checkpoint: {error}") from error


def access(name: str, target: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How the state of `target` is read and written. Raises UsageError for an object that has none."""
    if isinstance(target, torch.Generator):
        return target.get_state, target.set_state
    if isinstance(target, np.random.Generator):
        return lambda: target.bit_generator.state, lambda state: setattr(target.bit_generator, "state", state)
    if isinstance(target, np.random.RandomState):
        return lambda: target.get_state(legacy=False), target.set_state
    if isinstance(target, random.Random) and not isinstance(target, random.SystemRandom):
        return target.getstate, target.setstate
    get, put = getattr(target, "state_dict", None), getattr(target, "load_state_dict", None)
    if isinstance(target, type) or not callable(get) or not callable(put):
        raise UsageError(
            f"elastic.state.register({name}=...): a {kind_of(target)} has no state_dict() and load_state_dict(); give "
            "an object that has both, or a torch.Generator, numpy.random.Generator or random.Random"
        )
    return get, put


def kind_of(target: Any) -> str:
    return type(target).__qualname__


def _reference(value: Any, where: str, tensors: list[torch.Tensor]) -> Json | None:
    """A reference to the tensor or array, which is added to `tensors`; None for what is neither."""
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise UsageError(f"{where} is an array of Python objects, which cannot be kept; use numbers")
        body: Mapping[str, Json] = {"dtype": value.dtype.str, "shape": list(value.shape)}
        # A copy: the bytes of an array that has strides, or is read-only, are no tensor.
        tensors.append(torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else _NOTHING)
        return {_ARRAY: {**body, "number": len(tensors) - 1}}
    if not isinstance(value, torch.Tensor):
        return None
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        raise UsageError(f"{where} is a {kind_of(value)} ({value.layout}), which cannot be kept; use a dense tensor")
    check_dtype(where, value.dtype)
    tensors.append(value.detach())
    return {_TENSOR: {"number": len(tensors) - 1, "shape": list(value.shape), "device": value.device.type}}


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _resolved(kind: str, body: Any, tensors: tuple[torch.Tensor, ...], device: torch.device) -> Any:
    found = tensors[body["number"]]
    if kind == _ARRAY:
        return np.frombuffer(found.numpy().tobytes(), dtype=body["dtype"]).reshape(body["shape"]).copy()
    # A copy: the same state may be given to an object twice, and objects may keep what they are given.
    there = device if body["device"] == device.type else torch.device("cpu")
    return found.reshape(body["shape"]).to(there, copy=True)
