"""In which order a rank computes the passes of its stages: torch's schedules by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from elastic.core.sharding.stages import interleaved
from elastic.engines.fsdp2.pipeline.passes import Pass
from elastic.engines.fsdp2.pipeline.stage import Stage

_torchs: Callable[[str], Any] = get_schedule_class
# In rounds of micro-batches, as many in each.
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
# What those for several stages are with one, where it is not 1F1B.
_OF_ONE_STAGE = {"GPipe": "GPipe", "LoopedBFS": "GPipe"}

# What has failed is raised. torch would log the order of all ranks besides, on every survivor of a lost one.
logging.getLogger(_PipelineScheduleRuntime.__module__).addFilter(lambda record: record.levelno < logging.ERROR)


class Schedules:
    """Those of one engine: torch's are of one number of micro-batches each, and a run's last step may have fewer.
    `stages`: the rank's, in their order, all of one module."""

    def __init__(self, name: str, stages: Sequence[Stage], loss_fn: Callable[[Any, Any], Any]) -> None:
        self._name = name if len(stages) > 1 else _OF_ONE_STAGE.get(name, "1F1B")
        self._stages, self._loss_fn = list(stages), loss_fn
        self._made: dict[int, Any] = {}

    def run(self, passes: list[Pass]) -> None:
        """All passes of a step, forward and backward, and the reduction of the gradients. Collective."""
        made = self._made.get(len(passes))
        if made is None:
            made = self._made[len(passes)] = self._make(len(passes))
        made._step_microbatches(None, None, passes, None, return_outputs=False)
        if len(self._stages) > 1:
            self._stages[0].perform_reduce_grad(1)

    def _make(self, passes: int) -> Any:
        if len(self._stages) > 1:
            return _of_several(self._name, self._stages, passes, self._loss_fn)
        (stage,) = self._stages
        # torch's 1F1B refuses fewer micro-batches than stages: all of them are under way at once in GPipe as well.
        few = self._name == "1F1B" and passes < stage.num_stages
        return _torchs("GPipe" if few else self._name)(stage, passes, self._loss_fn, scale_grads=False)


def _of_several(name: str, stages: list[Stage], passes: int, loss_fn: Callable[[Any, Any], Any]) -> Any:
    """Numbers of micro-batches that torch's schedule refuses are computed in the order that is nearest to it."""
    ranks = stages[0].group_size
    if name in _IN_ROUNDS and passes % max(1, passes // ranks):
        made: Any = _PipelineScheduleRuntime(stages, passes, loss_fn, scale_grads=False)  # type: ignore[no-untyped-call]
        order = interleaved(ranks, len(stages), passes)
        made._prepare_schedule_with_comms(
            {rank: [as_torch_has_it(*one) for one in own] for rank, own in enumerate(order)}
        )
    elif name == "DualPipeV" and passes < stages[0].num_stages:
        made = _torchs("ZBVZeroBubble")(stages, passes, loss_fn, scale_grads=False)
    else:
        made = _torchs(name)(stages, passes, loss_fn, scale_grads=False)
    # The stages are one module: FSDP gathers each layer where it is needed, as with one stage, and the gradients are
    # reduced when all stages have theirs.
    made.register_custom_function(UNSHARD, _gathered)
    made.register_custom_function(RESHARD, _gathered)
    made.register_custom_function(REDUCE_GRAD, lambda action, ctx: None)
    return made


def as_torch_has_it(stage: int, forward: bool, micro_batch: int) -> _Action:
    return _Action(stage, FORWARD if forward else FULL_BACKWARD, micro_batch)


def _gathered(action: _Action, ctx: Any) -> None:
    """torch computes stages only that it has said to be gathered."""
    noted: set[int] = ctx.schedule_ref.unsharded_stages
    if action.computation_type == UNSHARD:
        noted.add(action.stage_index)
    else:
        noted.discard(action.stage_index)
