"""What an optimizer keeps of a parameter that has not its shape: factors of a matrix, preconditioners, lists of both.

Such tensors are whole on every rank. A snapshot has them beside the model's, by names of their own, and the value that
they are in, with *places* for them, among the optimizer's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from elastic.core.errors import UsageError

_PREFIX = "optimizer/"
_PLACE = "$other"
# Deeper ones would be of objects that refer to themselves.
_DEPTH = 4


def is_other(value: Any, like: torch.Tensor | None = None) -> bool:
    """Is it one, or does it hold some? `like`: the parameter, whose shape is no other one. A single element is a
    number."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.numel() != 1 and (like is None or value.shape != like.shape)
    return isinstance(value, (list, tuple, dict)) and is_plain(value)


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Tensors and texts in lists, tuples and dictionaries by texts or numbers: no numbers as values, which may change
    with each step."""
    if value is None or isinstance(value, (str, torch.Tensor)):
        return True
    if not depth:
        return False
    if type(value) is dict:
        named = all(isinstance(key, (int, float)) or (isinstance(key, str) and "/" not in key) for key in value)
        return named and all(is_plain(each, depth - 1) for each in value.values())
    return type(value) in (list, tuple) and all(is_plain(each, depth - 1) for each in value)


def taken_apart(key: str, value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The value with places instead of tensors, and these by their paths in the optimizer's state of a parameter.
    Raises UsageError where two have one path ({"a.b": ..., "a": {"b": ...}})."""
    found: dict[str, torch.Tensor] = {}

    def place(path: str, tensor: torch.Tensor) -> Any:
        if path in found:
            raise UsageError(
                f"an optimizer keeps two tensors of a parameter under {path!r}: give them keys that differ"
            )
        found[path] = tensor
        return {_PLACE: [path, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}

    return _mapped(key, value, place), found


def put_together(value: Any, tensor: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]) -> Any:
    """The inverse; `tensor` gives those of a path, of that shape and type. Without places the value as it is."""
    if isinstance(value, dict) and _PLACE in value:
        path, shape, dtype = value[_PLACE]
        return tensor(path, tuple(shape), getattr(torch, dtype))
    if isinstance(value, dict):
        return {key: put_together(each, tensor) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(put_together(each, tensor) for each in value)
    return value


def stored_name(parameter: str, path: str) -> str:
    """Of such a tensor in a snapshot. No tensor of a model has it: there is no "/" in its name."""
    return f"{_PREFIX}{parameter}/{path}"


def is_stored(name: str) -> bool:
    return name.startswith(_PREFIX)


def without_tensors(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Values that hold tensors, with places instead, and the others as they are."""
    return {key: value if _is_number(value) else taken_apart(str(key), value)[0] for key, value in state.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _mapped(path: str, value: Any, place: Callable[[str, torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return place(path, value)
    if isinstance(value, dict):
        return {key: _mapped(f"{path}.{key}", each, place) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(f"{path}.{number}", each, place) for number, each in enumerate(value))
    return value
