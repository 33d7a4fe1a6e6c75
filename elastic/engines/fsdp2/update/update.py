"""The update of one engine: each optimizer on shards, on DTensors or on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic.engines.fsdp2.update import local_step
from elastic.engines.fsdp2.update.counts import Counts
from elastic.engines.fsdp2.update.optimizers import parts_of
from elastic.engines.fsdp2.update.stand_ins import hooks_called_once
from elastic.engines.fsdp2.update.trial import Trial, try_optimizer
from elastic.engines.fsdp2.update.whole_step import WholeStep


class Update:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        stage: dist.ProcessGroup,
        exchange: Callable[..., Any],
    ) -> None:
        """`stage`: all ranks that have shards of the parameters, or of other slices of their layers. `exchange`:
        `dist.all_to_all_single`. Collective where a step is. Raises UsageError for an optimizer whose result would
        depend on the number of ranks."""
        self._steps: list[Callable[[], None]] = []
        self._optimizer = optimizer
        # What they keep in other shapes than their parameters'.
        self.others: frozenset[str] = frozenset()
        for part in parts_of(optimizer):
            trial = try_optimizer(part)
            self.others |= trial.others
            self._steps.append(_step_of(part, trial, device, stage, exchange))

    def __call__(self) -> None:
        """Collective."""
        parts = parts_of(self._optimizer)
        if parts == (self._optimizer,):
            self._steps[0]()
            return
        with hooks_called_once(self._optimizer):
            for step in self._steps:
                step()


def _step_of(
    optimizer: torch.optim.Optimizer,
    trial: Trial,
    device: torch.device,
    stage: dist.ProcessGroup,
    exchange: Callable[..., Any],
) -> Callable[[], None]:
    if not trial.groups:
        return lambda: local_step.step(optimizer)
    counts = Counts(optimizer, trial)
    whole = WholeStep(optimizer, trial, device, stage, exchange, counts)
    rest = [number for number in range(len(optimizer.param_groups)) if number not in trial.groups]

    def step() -> None:
        with hooks_called_once(optimizer), counts.once():
            whole.step()
            if rest:
                with counts.of({number: optimizer.param_groups[number]["params"] for number in rest}):
                    local_step.on_shards(optimizer, rest)

    return step
