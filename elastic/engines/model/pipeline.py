"""A model as a row of layers that ranks share out in stages: what the user says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pipeline:
    """`pipeline=` of `elastic.initialize`, with the engine fsdp2.

    `loss_fn(outputs, labels)` gives the mean loss of a micro-batch. `layers` are the names of the modules that are
    called one after another, each with what the one before it gave (a tensor, or a tuple of tensors): names or patterns
    of them, as "layers.*"; None for the children of a torch.nn.Sequential. The model's own `forward` is not called.
    `begins` gives, for a number of stages (of all ranks together), the name of the layer that each of them begins with;
    for other numbers stages are cut so that the largest has the fewest parameters.
    """

    loss_fn: Callable[[Any, Any], Any]
    layers: Sequence[str] | None = None
    begins: Mapping[int, Sequence[str]] = field(default_factory=dict)
