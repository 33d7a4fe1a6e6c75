"""The user's optimizer where ranks share experts: these need parameter groups of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from elastic.core.errors import UsageError
from elastic.engines.base import UserObjects
from elastic.engines.deepspeed.experts.placement import is_expert

# The default of deepspeed/moe/utils.py: one group has at most so many parameters of experts.
_DEEPSPEEDS_MOST = 178_956_971


class Regrouped:
    """Stands for an optimizer while DeepSpeed builds its engine: to DeepSpeed a function that gives an optimizer, whose
    parameter groups it points at AutoEP's parameters first. Experts get groups of their own. The optimizer that comes
    out is the user's own."""

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


def regrouped(objects: UserObjects, native: bool) -> Any:
    """What to give to DeepSpeed in the place of the optimizer. `native`: experts are parameters of the model as it was
    given, whose groups the script may have split already."""
    optimizer = objects.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or (native and _is_split(optimizer)):
        return optimizer
    return Regrouped(optimizer)


@contextmanager
def groups_of_any_size(wanted: bool) -> Iterator[None]:
    """DeepSpeed begins another group of experts where a rank's have more parameters than so many: at another `ep` there
    would be another number of groups. Where it changes they are not cut, while DeepSpeed builds its engine."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    before = split.__defaults__
    split.__defaults__ = (float("inf"),) if wanted else before
    try:
        yield
    finally:
        split.__defaults__ = before


def count_in_norm(wrapper: Any) -> None:
    """Of an optimizer of stage 1 or 2 whose ranks share layers and experts. The norm of a gradient has of what is no
    slice what the first of the ranks that share layers has, which is right of what all of them have: DeepSpeed 0.19.8
    leaves out the others' experts, and clips by what is left (stage 3 counts them: `_grad_norm_counts_every_rank`)."""
    original, own = wrapper.get_grad_norm_direct, wrapper.model_parallel_rank

    def counted(gradients: Any, params: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        wrapper.model_parallel_rank = 0 if any(map(is_expert, params)) else own
        try:
            return original(gradients, params, *args, **kwargs)
        finally:
            wrapper.model_parallel_rank = own

    wrapper.get_grad_norm_direct = counted


def require_groups(objects: UserObjects, native: bool, ep_changes: bool) -> None:
    """Raises UsageError for groups that experts cannot have here, and for a learning-rate scheduler that was made
    before they had any: it would not reach them."""
    optimizer = objects.optimizer
    if native and (not isinstance(optimizer, torch.optim.Optimizer) or _is_split(optimizer)):
        if ep_changes and isinstance(optimizer, torch.optim.Optimizer):
            _refuse_cut_by_size(optimizer.param_groups)
        return
    if objects.lr_scheduler is not None and not callable(objects.lr_scheduler):
        before = "the experts had" if native else "AutoEP gave the experts"
        raise UsageError(
            f"the learning-rate scheduler {type(objects.lr_scheduler).__name__} was made before {before} parameter "
            "groups of their own, which it would not change: give lr_scheduler as a function of the optimizer, or the "
            f"DeepSpeed configuration's `scheduler`{_SPLIT if native else ''}"
        )


_SPLIT = ", or make the optimizer of groups that split_params_into_different_moe_groups_for_optimizer has given"


def _is_split(optimizer: torch.optim.Optimizer) -> bool:
    """Raises UsageError where some experts are in groups of their own and others are not."""
    groups = optimizer.param_groups
    among = [any(map(is_expert, group["params"])) for group in groups if not group.get("moe")]
    if any(among) and len(among) < len(groups):
        raise UsageError(
            "some experts are in parameter groups of their own (moe: True), and others are not: give all groups to "
            "split_params_into_different_moe_groups_for_optimizer, or none"
        )
    return not any(among)


def _refuse_cut_by_size(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError for groups of which there would be another number at another `ep`."""
    experts = [group for group in groups if group.get("moe")]
    for _, alike in groupby(experts, lambda group: [(key, value) for key, value in group.items() if key != "params"]):
        cut = list(alike)
        if len(cut) > 1 and sum(p.numel() for group in cut for p in group["params"]) > _DEEPSPEEDS_MOST:
            raise UsageError(
                f"the experts' parameters are in {len(cut)} groups by size, and there would be another number of them "
                "at another ep of the job's mesh: give split_params_into_different_moe_groups_for_optimizer "
                "max_group_size=None"
            )
