"""Where the training loop is within a step, and what it may do next. No torch, no I/O: plain bookkeeping."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.errors import UsageError


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
