"""Parameters of a model that an engine was built on before: whole shapes that take no memory.

Their values are restored, so nobody needs them until the next engine has cut the model into what each rank has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def placeholder(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of this shape, one element of memory; of the dtype and on the device of `like`."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))


def is_placeholder(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())


def fill_placeholders(model: nn.Module) -> None:
    """Memory for a model's parameters that have none."""
    for parameter in model.parameters():
        if is_placeholder(parameter):
            parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def renew_accumulator(parameter: torch.Tensor) -> None:
    """Of a leaf whose shape has changed: torch makes the node that adds up its gradients anew, with this shape.

    A loss that the script still holds keeps the one of before. torch drops it where data of another dtype is set
    (torch/csrc/autograd/variable.cpp, `VariableHooks::set_data`, as of 2.13).
    """
    values = parameter.data
    other = torch.half if values.dtype != torch.half else torch.float
    parameter.data = torch.empty(0, dtype=other, device=values.device)
    parameter.data = values
