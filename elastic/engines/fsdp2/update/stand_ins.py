"""An optimizer's step on plain tensors in the place of its sharded parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor


class StandIn(NamedTuple):
    """A tensor with its gradient in `grad`, and the optimizer's state of it, which the step changes."""

    tensor: torch.Tensor
    state: dict[Any, Any]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part; it shares memory. No operation on the DTensor is dispatched."""
    # `to_local` differentiates, at ten times the cost: a snapshot asks for each tensor.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor)


def put(optimizer: torch.optim.Optimizer, parameter: Any, key: Any, value: Any, shape: Sequence[int]) -> None:
    """What the optimizer keeps of a sharded parameter: of this rank's shard, a tensor of `shape`, as a DTensor."""
    state = optimizer.state[parameter]
    known = state.get(key)
    if not (isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == tuple(shape)):
        state[key] = value
    elif not isinstance(known, DTensor):
        state[key] = DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    elif known._local_tensor is not value and known._local_tensor.data_ptr() != value.data_ptr():
        known._local_tensor.copy_(value)


@contextmanager
def standing_in(optimizer: torch.optim.Optimizer, by_group: Mapping[int, Sequence[StandIn]]) -> Iterator[None]:
    """In it, the optimizer has these and no other parameters, state and groups."""
    state, groups, params = optimizer.state, optimizer.param_groups, [g["params"] for g in optimizer.param_groups]
    optimizer.state = defaultdict(dict)
    # Some look at the last tensor of each group.
    optimizer.param_groups = [group for number, group in enumerate(groups) if by_group.get(number)]
    for number, found in by_group.items():
        groups[number]["params"] = [each.tensor for each in found]
        for each in found:
            if each.state:
                optimizer.state[each.tensor] = each.state
    try:
        yield
        for each in (each for found in by_group.values() for each in found):
            # A state that the step has made, or put in the place of the one before.
            made = optimizer.state.get(each.tensor)
            if made is not None and made is not each.state:
                each.state.clear()
                each.state.update(made)
    finally:
        optimizer.state, optimizer.param_groups = state, groups
        for group, own in zip(groups, params, strict=True):
            group["params"] = own


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


@contextmanager
def hooks_called_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around several steps that make one update: the user's hooks see it as one, and the sharded parameters."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in before.values():
        hook(optimizer, (), {})
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    for hook in after.values():
        hook(optimizer, (), {})
