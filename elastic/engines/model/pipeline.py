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

    With `own_forward` each stage calls the model's own `forward` with the whole micro-batch, in which the layers of
    other stages are passed over. `layers` are then named in the order in which it calls them; several that are to be in
    one stage are one element, as ("embed", "places"); None for the plan that a model of transformers has. From stage to
    stage travels the first argument of the layer that the next one begins with. Without `loss_fn` the model gives the
    mean loss: as a number, as `.loss`, or as the only number of a tuple.
    """

    loss_fn: Callable[[Any, Any], Any] | None = None
    layers: Sequence[str | Sequence[str]] | None = None
    begins: Mapping[int, Sequence[str]] = field(default_factory=dict)
    own_forward: bool = False
