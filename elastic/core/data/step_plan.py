"""Which samples each step of a run consumes on one rank, as far as the run's end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.core.data.micro_batches import MicroBatch, deal, next_position, step_positions, steps_in
from elastic.core.data.samples import SampleOrder
from elastic.core.data.steps import Range
from elastic.core.errors import UsageError


@dataclass(frozen=True)
class StepPlan:
    """The fixed facts by which any step of the run is dealt. All figures count samples, except `world_size`, `rank`
    and `micro_steps` (the micro-batches of a full step on each rank: the gradient accumulation steps).

    `total_samples` is what the run consumes; `skips` are the ranges of positions that it leaves out.
    Without `shuffle` every epoch has the dataset's own order."""

    global_batch: int
    micro_batch: int
    world_size: int
    rank: int
    dataset_size: int
    total_samples: int
    micro_steps: int
    skips: tuple[Range, ...] = ()
    shuffle: bool = True

    def order(self, seed: int) -> SampleOrder:
        """The dataset index of every position."""
        return SampleOrder(self.dataset_size, seed, self.shuffle)

    @property
    def last_step(self) -> int:
        """Number of steps in the whole run."""
        return steps_in(self.total_samples, self.global_batch)

    def deal(self, step: int) -> tuple[MicroBatch, ...]:
        return deal(
            step, self.global_batch, self.micro_batch, self.world_size, self.rank, self.total_samples, self.skips
        )

    def consumed(self, step: int) -> int:
        """Samples that were consumed when `step` steps are finished."""
        return min(step * self.global_batch, self.total_samples)

    def position(self, step: int) -> int:
        """The position of the sample that follows when `step` steps are finished."""
        return next_position(self.consumed(step), self.skips)

    def positions(self, step: int) -> Range:
        """What the whole step consumes, on all ranks."""
        return step_positions(step, self.global_batch, self.total_samples, self.skips)

    def epoch(self, step: int) -> int:
        """The epoch in which the step's first sample lies; a step may reach over into the next."""
        return next_position(step * self.global_batch, self.skips) // self.dataset_size


def total_samples(
    dataset_size: int, global_batch: int, max_steps: int | None, epochs: int | None, skips: Iterable[Range] = ()
) -> int:
    """How many samples the run consumes: whichever of `max_steps` and `epochs` ends first; one epoch without both.

    Samples that are skipped are missing from an epoch, not from a number of steps.
    """
    for name, value in (("max_steps", max_steps), ("epochs", epochs)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    limits = []
    if max_steps is not None:
        limits.append(max_steps * global_batch)
    if epochs is not None or max_steps is None:
        whole = (epochs or 1) * dataset_size
        limits.append(whole - sum(max(0, min(stop, whole) - start) for start, stop in skips))
    return min(limits)
