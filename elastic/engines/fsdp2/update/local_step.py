"""An optimizer's step on the rank's own shards, without DTensor in between.

Optimizers that treat each element by itself compute the same on shards as on DTensors, which add a dispatch to each of
their operations and, for each shape in each new mesh, a plan: of a GPT with 52 parameters 72 plans in the first step
after every change of the world, 0.1 s of one core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from elastic.engines.fsdp2.marks import marked, marks_of
from elastic.engines.fsdp2.update.stand_ins import StandIn, has_hooks, is_sharded, local_of, put, standing_in

# Of subclasses nothing is known, and others may make states that are no DTensors.
_BY_ELEMENT = frozenset(
    {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad}
)


def step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`."""
    if _may_be_local(optimizer):
        on_shards(optimizer, range(len(optimizer.param_groups)))
    else:
        optimizer.step()


def on_shards(optimizer: torch.optim.Optimizer, groups: Iterable[int]) -> None:
    """The step of the parameters in these groups, element by element."""
    by_group: dict[int, list[StandIn]] = {}
    for number in groups:
        by_group[number] = [_shard(optimizer, parameter) for parameter in optimizer.param_groups[number]["params"]]
    with standing_in(optimizer, by_group):
        optimizer.step()
    for number, shards in by_group.items():
        for parameter, shard in zip(optimizer.param_groups[number]["params"], shards, strict=True):
            for key, value in shard.state.items():
                put(optimizer, parameter, key, value, shard.tensor.shape)


def _shard(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> StandIn:
    local = marked(local_of(parameter), marks_of(parameter))
    local.grad = None if parameter.grad is None else local_of(parameter.grad)
    state = optimizer.state.get(parameter) or {}
    return StandIn(local, {key: local_of(value) if is_sharded(value) else value for key, value in state.items()})


def _may_be_local(optimizer: torch.optim.Optimizer) -> bool:
    """With all of its state in place: what a first step makes are DTensors. The user's hooks see DTensors, too."""
    if type(optimizer) not in _BY_ELEMENT or has_hooks(optimizer):
        return False
    return all(optimizer.state.get(parameter) for parameter in _stepped(optimizer))


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
