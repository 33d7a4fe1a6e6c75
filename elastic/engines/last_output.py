"""What a forward pass gives in a step that is abandoned, where the weights are on other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class LastOutput:
    """Zeros in the shape of the last forward pass. It keeps shapes, not tensors."""

    def __init__(self) -> None:
        self._made: Any = None

    def seen(self, output: Any) -> Any:
        """Note the shape of an output, and return it."""
        self._made = tree_map(_zeros_like, output)
        return output

    def zeros(self) -> Any:
        """Raises RuntimeError where no pass has been seen."""
        if self._made is None:
            raise RuntimeError("the first forward pass of an engine failed: it has no output whose shape is known")
        return tree_map(lambda make: make() if callable(make) else make, self._made)

    def forget(self) -> None:
        self._made = None


def _zeros_like(value: Any) -> Any:
    """A function that makes a tensor of zeros of the same shape, which a backward pass may begin at."""
    if not isinstance(value, torch.Tensor):
        return value
    shape, dtype, device, trained = value.shape, value.dtype, value.device, value.requires_grad
    return lambda: torch.zeros(shape, dtype=dtype, device=device, requires_grad=trained)
