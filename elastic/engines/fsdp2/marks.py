"""What a script writes on parameters for its optimizer to see: `parameter.use_muon = True`.

`fully_shard` puts other parameters in their places, which have none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from elastic.engines.model.plain_names import named_parameters

Marks = Mapping[str, Any]

# torch's own.
_OF_TORCH = frozenset({"_is_param"})

# Of each model, by name, those of before it was first sharded.
_first: WeakKeyDictionary[torch.nn.Module, Mapping[str, Marks]] = WeakKeyDictionary()


def marks_of(parameter: torch.Tensor) -> Marks:
    held = vars(parameter)
    return {k: v for k, v in held.items() if isinstance(v, (bool, int, float, str)) and k not in _OF_TORCH}


def marked(tensor: torch.Tensor, marks: Marks) -> torch.Tensor:
    """The same tensor with these."""
    for key, value in marks.items():
        setattr(tensor, key, value)
    return tensor


def note(model: torch.nn.Module) -> None:
    """Before the model is sharded; what counts is the first time."""
    if model not in _first:
        _first[model] = {name: found for name, tensor in named_parameters(model) if (found := marks_of(tensor))}


def carry(model: torch.nn.Module) -> None:
    """To the sharded parameters, as far as this rank has them."""
    first = _first[model]
    for name, parameter in named_parameters(model) if first else ():
        marked(parameter, first.get(name, {}))
