"""A global batch that follows the number of workers, and what it makes of the learning rate.

Every data-parallel worker has equally many micro-batches in every step, so that a step takes as long at any world size
and its batch is in proportion to the workers. The configured batch, and the learning rate that goes with it, are those
of the most workers. For a batch of B instead of B_full the rate is times (B / B_full) ** p: p = 1, *linear*, for SGD
(Goyal et al., arXiv 1706.02677); p = 1/2, *sqrt*, for optimizers that divide by the gradient's size, Adam for one
(Malladi et al., NeurIPS 2022, arXiv 2205.10287); p = 0, *constant*.

Pure. `Change`s are in the data cursor, so that every rank of every generation comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic.core.errors import UsageError

POWERS = {"linear": 1.0, "sqrt": 0.5, "constant": 0.0}


class Change(NamedTuple):
    """When `step` steps with `samples` samples in all were finished, a step came to have `batch` samples."""

    step: int
    samples: int
    batch: int


@dataclass(frozen=True)
class AdaptiveBatch:
    """`rate`: how the learning rate follows the batch (`POWERS`). To a larger factor it goes in a straight line over
    `warmup_steps` steps; to a smaller one at once, since a rate that is too large for its batch may diverge."""

    rate: str
    warmup_steps: int = 0

    def batch(self, full: int, micro: int, workers: int, most: int) -> int:
        """Samples of a step of `workers` data-parallel workers, where `most` of them have `full`. Raises UsageError."""
        if full % (micro * most):
            raise UsageError(
                f"batch.adaptive: the global batch ({full}) must be a multiple of micro_batch ({micro}) times the most "
                f"data-parallel workers ({most}), so that all of them have equally many micro-batches"
            )
        return full // most * workers

    def factor(self, full: int, changes: Sequence[Change], step: int) -> float:
        """Of the learning rate in the step that follows when `step` steps are finished."""
        found = self._target(full, changes[0])
        for change, following in zip(changes[1:], (*changes[2:], None), strict=False):
            if change.step > step:
                break
            at = step if following is None else min(step, following.step - 1)
            found = self._towards(found, self._target(full, change), at - change.step)
        return found

    def _towards(self, before: float, target: float, since: int) -> float:
        """`since`: finished steps since the change."""
        if target <= before or since >= self.warmup_steps:
            return target
        return before + (target - before) * (since + 1) / (self.warmup_steps + 1)

    def _target(self, full: int, change: Change) -> float:
        return float((change.batch / full) ** POWERS[self.rate])


def changed(changes: Sequence[Change], step: int, samples: int, batch: int) -> tuple[Change, ...]:
    """With what the batch is from here on."""
    kept = tuple(change for change in changes if change.step < step or change.step == step == 0)
    if kept and kept[-1].batch == batch:
        return kept
    return (*(change for change in kept if change.step < step), Change(step, samples, batch))


def consumed(changes: Sequence[Change], step: int) -> int:
    """Samples of the first `step` steps."""
    change = next(change for change in reversed(changes) if change.step <= step)
    return change.samples + (step - change.step) * change.batch


def refused_adaptive(
    *, rollback: bool, audited: bool, late: bool, streams: bool = False, measured: bool = False
) -> str | None:
    """What does not go with a batch that follows the number of workers, as a sentence; None where nothing does not."""
    found = {
        "a stream, whose readers read whole steps of one size": streams,
        "scaling_policy: measured, which compares the seconds of steps of one size": measured,
        "anomalies.policy: rollback, which leaves out whole steps of one size (choose skip or stop)": rollback,
        "audit.every_steps, which repeats micro-batches by their number in the step": audited,
        "communication.semantics: local or async, which apply gradients of several steps together": late,
    }
    why = next((why for why, so in found.items() if so), None)
    return None if why is None else f"batch.adaptive does not go with {why}"
