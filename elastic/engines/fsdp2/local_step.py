"""An optimizer's step on the rank's own shards, without DTensor in between.

Optimizers that treat each element by itself compute the same on shards as on DTensors, which add a dispatch to each of
their operations and, for each shape in each new mesh, a plan: of a GPT with 52 parameters 72 plans in the first step
after every change of the world, 0.1 s of one core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Others may need whole tensors (Adafactor, Muon), and of subclasses nothing is known.
_BY_ELEMENT = frozenset(
    {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad}
)


def step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`."""
    if _may_be_local(optimizer):
        with _on_shards(optimizer):
            optimizer.step()
    else:
        optimizer.step()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part; it shares memory. No operation on the DTensor is dispatched."""
    # `to_local` differentiates, at ten times the cost: a snapshot asks for each tensor.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _may_be_local(optimizer: torch.optim.Optimizer) -> bool:
    """With all of its state in place: what a first step makes are DTensors. The user's hooks see DTensors, too."""
    hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    if type(optimizer) not in _BY_ELEMENT or hooks:
        return False
    return all(optimizer.state.get(parameter) for parameter in _stepped(optimizer))


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


@contextmanager
def _on_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In it, the optimizer's parameters, gradients and state are the rank's own parts."""
    state, params = optimizer.state, [group["params"] for group in optimizer.param_groups]
    shards: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    whole: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
        group["params"] = [local_of(parameter) for parameter in stepped]
        for shard, parameter in zip(group["params"], stepped, strict=True):
            shard.grad, whole[shard] = local_of(parameter.grad), parameter
            shards[shard] = {
                name: local_of(value) if isinstance(value, DTensor) else value
                for name, value in state[parameter].items()
            }
    optimizer.state = shards
    try:
        yield
    finally:
        optimizer.state = state
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        for shard, values in shards.items():
            # Tensors were changed in place; numbers are new.
            state[whole[shard]].update(
                {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
            )
