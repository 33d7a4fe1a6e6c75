"""Parameters that are left whole where ranks share layers: is their gradient the same on all ranks of a cell?

It is where a parameter is applied to what each rank has whole. Applied to a rank's slices (a norm of queries and keys
per head, say) it gets a part of its gradient on each rank, and the copies would drift apart without a word. Engines add
such parts up where they are told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastic.core.errors import UsageError

# What is compared of a gradient: the sums of every 61st element. A prime: no width of a layer is a multiple of it.
_SUMS = 61
# Of the gradient's size. Rounding is far below, a missing part far above.
_ALLOWED = 0.1
# Of the largest gradient's size: what is smaller may be nothing but rounding.
_SMALLEST = 1e-4


class WholeGradients:
    """Of one engine: compared in its first backward pass that gives gradients, once."""

    def __init__(self, cell: dist.ProcessGroup, device: torch.device, remedy: str) -> None:
        """`remedy`: how this engine is told to add the parts up, as the end of a sentence."""
        self._cell, self._device, self._remedy = cell, device, remedy
        self.compared = False

    @contextmanager
    def compare(self, whole: dict[str, Any]) -> Iterator[None]:
        """Around a backward pass; `whole` are the leaves of parameters that all ranks have whole. Collective over the
        cell.

        Raises UsageError, on all its ranks, naming a parameter whose gradients differ.
        """
        sums = {name: torch.zeros(_SUMS, dtype=torch.float64, device=leaf.device) for name, leaf in whole.items()}
        hooks = [leaf.register_hook(partial(_add, sums[name])) for name, leaf in whole.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if sums:
            self._judge(list(sums), torch.stack(list(sums.values())).to(self._device))

    def look(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """The same for gradients that are reduced already, or this rank's shards of them: all ranks of a cell have the
        same rows."""
        sums = torch.zeros(len(gradients), _SUMS, dtype=torch.float64)
        for own, gradient in zip(sums, gradients.values(), strict=True):
            _add(own, gradient.detach().cpu())
        if gradients:
            self._judge(list(gradients), sums.to(self._device))

    def _judge(self, names: list[str], own: torch.Tensor) -> None:
        mean = own.clone()
        dist.all_reduce(mean, group=self._cell)
        mean /= dist.get_world_size(self._cell)
        size, apart = mean.norm(dim=1), (own - mean).norm(dim=1)
        if not bool(mean.isfinite().all()) or not bool(size.any()):
            # A padding pass, or a step that is skipped: the same on all ranks.
            return
        self.compared = True
        unlike = (apart > _ALLOWED * size) & (torch.maximum(apart, size) > _SMALLEST * size.max())
        flags = unlike.to(torch.int64)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._cell)
        found = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
        if found:
            raise UsageError(
                f"the ranks that share layers have different gradients of {found[0]} ({len(found)} such parameters), "
                f"which each holds whole and applies to its own slices: {self._remedy}"
            )


def _add(sums: torch.Tensor, gradient: torch.Tensor) -> None:
    values = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    even = values.numel() - values.numel() % _SUMS
    sums += values[:even].view(-1, _SUMS).sum(0, dtype=torch.float64)
    sums[: values.numel() - even] += values[even:]
