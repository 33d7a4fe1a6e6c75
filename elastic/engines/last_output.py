"""What a forward pass gives in a step that is abandoned, where the weights are on other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map


class LastOutput:
    """Zeros in the shape of the last forward pass in training. It keeps shapes, not tensors."""

    def __init__(self) -> None:
        self._made: Any = None

    @classmethod
    def of(cls, module: torch.nn.Module) -> LastOutput:
        """The same for each engine on one module: another peer may be lost before the first pass of the next one."""
        return _of_modules.setdefault(module, cls())

    def seen(self, output: Any, training: bool) -> Any:
        """Note the shape of an output in `training`, and return it."""
        if training:
            self._made = tree_map(_zeros_like, output)
        return output

    def zeros(self) -> Any:
        """Raises RuntimeError where no pass has been seen."""
        if self._made is None:
            raise RuntimeError("the first forward pass of a run failed: it has no output whose shape is known")
        return tree_map(lambda make: make() if isinstance(make, _Zeros) else make, self._made)

    def forget(self) -> None:
        """The engine is closed: what is neither a tensor nor plain may refer to it."""
        self._made = tree_map(lambda each: each if isinstance(each, _PLAIN) else None, self._made)


_of_modules: WeakKeyDictionary[torch.nn.Module, LastOutput] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Zeros:
    """Makes a tensor of zeros of the same shape, which a backward pass may begin at."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    trained: bool

    def __call__(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.trained)


_PLAIN = (_Zeros, bool, int, float, str, type(None))


def _zeros_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Zeros(value.shape, value.dtype, value.device, value.requires_grad)
