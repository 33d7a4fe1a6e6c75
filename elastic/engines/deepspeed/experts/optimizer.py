"""The user's optimizer where AutoEP replaces parameters: experts need parameter groups of their own."""

from __future__ import annotations

from typing import Any

import torch

from elastic.core.errors import UsageError


class Regrouped:
    """Stands for an optimizer while DeepSpeed builds its engine: to DeepSpeed a function that gives an optimizer, whose
    parameter groups it points at AutoEP's parameters first. The optimizer that comes out is the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def __call__(self, _: Any) -> torch.optim.Optimizer:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        for number, group in enumerate(self.param_groups):
            group.setdefault("name", f"group {number}")
        # As it does with an optimizer from its configuration.
        split_params_into_different_moe_groups_for_optimizer(self.param_groups)
        return self._optimizer


def regrouped(optimizer: Any) -> Any:
    """What to give to DeepSpeed in the place of `optimizer`."""
    return Regrouped(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def refuse_scheduler(scheduler: Any) -> None:
    """Raises UsageError for one that was made before the experts had groups of their own: it would not reach them."""
    if scheduler is not None and not callable(scheduler):
        raise UsageError(
            f"the learning-rate scheduler {type(scheduler).__name__} was made before AutoEP gave the experts parameter "
            "groups of their own, which it would not change: give lr_scheduler as a function of the optimizer, or the "
            "DeepSpeed configuration's `scheduler`"
        )
