"""Where the training loop is within a step, and what it may do next. No torch, no I/O: plain bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.core.data.micro_batches import MicroBatch, deal, next_position, step_positions, steps_in
from elastic.core.data.steps import Range
from elastic.core.errors import UsageError


@dataclass(frozen=True)
class StepPlan:
    """The fixed facts by which any step of the run is dealt. All figures count samples, except `world_size`, `rank`
    and `passes` (what DeepSpeed takes for its gradient accumulation steps: the passes of a full step).

    `total_samples` is what the run consumes; `skips` are the ranges of positions that it leaves out."""

    global_batch: int
    micro_batch: int
    world_size: int
    rank: int
    dataset_size: int
    total_samples: int
    passes: int
    skips: tuple[Range, ...] = ()

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


@dataclass
class StepProgress:
    """One step under way: the passes, which of them is the user's, and what has been summed up so far."""

    step: int
    passes: tuple[MicroBatch, ...]
    begun: float = field(default_factory=time.perf_counter)
    next_pass: int = 0
    active: MicroBatch | None = None
    forwards: int = 0
    backwards: int = 0
    data_wait_s: float = 0.0
    # Waiting for copies of the step before to be made, before the weights may change.
    fenced_s: float = 0.0
    tokens: int = 0

    @property
    def complete(self) -> bool:
        return self.active is None and self.next_pass == len(self.passes)

    @property
    def on_last_pass(self) -> bool:
        return self.next_pass == len(self.passes)

    def hand_out(self) -> MicroBatch:
        """The next pass becomes the user's. Raises UsageError when the one before was not finished."""
        self.require_stepped()
        self.active = self.passes[self.next_pass]
        self.next_pass += 1
        self.forwards = self.backwards = 0
        return self.active

    def require_stepped(self) -> None:
        if self.active is not None:
            raise UsageError(
                f"step {self.step}: the loader was asked for the next batch before engine.step(); "
                "call engine.step() after every engine.backward(loss), as with DeepSpeed's gradient accumulation "
                "(the weights change at the last micro-batch of a step only)"
            )

    def require_backward(self) -> None:
        if self.active is None:
            raise UsageError("engine.step() was called without a batch from the loader; iterate over the loader")
        if self.backwards == 0:
            raise UsageError(f"step {self.step}: engine.step() was called without engine.backward(loss)")

    def finish_pass(self) -> None:
        self.active = None

    def positions(self) -> tuple[tuple[int, int], ...]:
        """What this rank consumed with weight, as ranges in ascending order, neighbours joined."""
        joined: list[tuple[int, int]] = []
        for part in sorted(p for p in ((m.start, m.stop) for m in self.passes if m.weight > 0)):
            if joined and joined[-1][1] == part[0]:
                joined[-1] = (joined[-1][0], part[1])
            else:
                joined.append(part)
        return tuple(joined)


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
