"""The types in which a model computes, as those of its parameters and buffers alone do not tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Precision:
    """`weights` are of this type where `others` does not name them, buffers included; those that are no floating-point
    numbers stay what they are. `autocast`: None for none. `casts_inputs`: to the type of the weights. `by_engine`: the
    pass is the engine's, which has parts of the weights only."""

    weights: torch.dtype
    others: Mapping[str, torch.dtype] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    casts_inputs: bool = False
    by_engine: bool = False

    @classmethod
    def of(cls, module: torch.nn.Module, autocast: torch.dtype | None = None) -> Precision:
        """Of a pass in which everything is used as it is."""
        types = {name: tensor.dtype for name, tensor in floating(module).items()}
        most = Counter(types.values()).most_common(1)
        weights = most[0][0] if most else torch.get_default_dtype()
        return cls(weights, {name: dtype for name, dtype in types.items() if dtype != weights}, autocast)

    def type_of(self, name: str) -> torch.dtype:
        return self.others.get(name, self.weights)


def floating(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers of floating-point numbers, by name."""
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in every.items() if tensor.is_floating_point()}
