"""In which order a stage computes its passes: torch's schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

_SCHEDULES: dict[str, Any] = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class Schedules:
    """Those of one engine: torch's are of one number of micro-batches each, and a run's last step may have fewer."""

    def __init__(self, name: str, stage: PipelineStage, loss_fn: Callable[[Any, Any], Any]) -> None:
        self._name, self._stage, self._loss_fn = name, stage, loss_fn
        self._made: dict[int, Any] = {}

    def of(self, passes: int) -> Any:
        """The schedule of so many micro-batches. With fewer than stages, which torch's 1F1B refuses, it is GPipe: all
        of them are under way at once in either."""
        if passes not in self._made:
            few = self._name == "1F1B" and passes < self._stage.num_stages
            kind = _SCHEDULES["GPipe" if few else self._name]
            self._made[passes] = kind(self._stage, passes, self._loss_fn, scale_grads=False)
        return self._made[passes]
