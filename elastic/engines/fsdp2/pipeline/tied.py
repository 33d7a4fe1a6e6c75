"""Parameters that several ranks of a pipeline have: each has a copy, and their gradients are added up. Where the stages
that share one are a rank's own, it is one parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from elastic.core.errors import UsageError
from elastic.engines.fsdp2.gradients import shard_of
from elastic.engines.fsdp2.meshes import over_cell
from elastic.engines.fsdp2.pipeline.layers import Cut
from elastic.engines.model.plain_names import named_parameters

# Of a rank that does not have a parameter: below all dimensions.
_NOWHERE = -99


# By the ranks of a pipeline that share a parameter.
Groups = Mapping[tuple[int, ...], dist.ProcessGroup]


def groups_of_tied(cut: Cut, pipeline: Sequence[int]) -> Groups:
    """Of this rank. `pipeline`: the ranks of this one in their order. Collective over them."""
    return {
        sharing: dist.new_group([pipeline[rank] for rank in sharing], use_local_synchronization=True)
        for sharing in sorted(set(cut.tied.values()))
        if cut.rank in sharing
    }


class TiedGradients:
    """Of one rank. The ranks of a pipeline that share a parameter cut it alike, so that those with the same data
    coordinate hold the same rows of it."""

    def __init__(
        self,
        module: torch.nn.Module,
        cut: Cut,
        groups: Groups,
        device: torch.device,
        all_reduce: Callable[..., Any],
    ) -> None:
        self._device, self._all_reduce = device, all_reduce
        held = {name: p for name, p in named_parameters(module) if name in cut.tied and p.requires_grad}
        # In the order of the names, which the ranks have in common.
        self._parameters = [(held[name], groups[cut.tied[name]]) for name in sorted(held)]
        self.groups = list(groups.values())
        self.copies: Mapping[int, int] = {id(p): group.size() for p, group in self._parameters}

    def add_up(self) -> None:
        """After the step's last reduction. Collective over the ranks of a pipeline that share one."""
        for parameter, group in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            local = shard_of(gradient)
            there = local.to(self._device)
            if there.numel():
                self._all_reduce(there, group=group)
            if there.data_ptr() != local.data_ptr():
                local.copy_(there)

    def close(self) -> None:
        self._parameters, self.groups, self.copies = [], [], {}


def require_alike(module: torch.nn.Module, cut: Cut, pipeline: dist.ProcessGroup, device: torch.device) -> None:
    """Raises UsageError, in all stages, for a tied parameter that a tensor-parallel plan cuts otherwise in one of them.
    Collective over `pipeline`."""
    if not cut.tied:
        return
    held = dict(named_parameters(module))
    found = []
    for name in sorted(cut.tied):
        placement = over_cell(held[name]) if name in held else None
        dim = placement.dim if isinstance(placement, Shard) else -1
        found.append((dim, -dim) if name in held else (_NOWHERE, _NOWHERE))
    highest = torch.tensor(found, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=pipeline)
    for name, (high, low) in zip(sorted(cut.tied), highest.tolist(), strict=True):
        if high != -low:
            raise UsageError(
                f"tp_plan cuts the tied parameter {name!r} in one stage as in no other; cut all places alike (an "
                "embedding with RowwiseParallel(input_layouts=Replicate()), its head with ColwiseParallel), or none"
            )
