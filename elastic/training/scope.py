"""One generation as its parts see it: what is fixed, how far it has come, and whether it may continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from elastic.comm.failures import as_collective_failure
from elastic.core.errors import GenerationEnded, Where
from elastic.core.generation_spec import GenerationSpec
from elastic.training.result import BadStep
from elastic.training.session import Coordinator, Phase

# How often progress without steps is reported.
MOVED_EVERY_S = 1.0


@dataclass
class GenerationScope:
    """Knows no engine, no loader and no process group. `step` counts finished optimizer steps.

    Only the training thread changes it, except for `end`, which any thread may call.
    """

    spec: GenerationSpec
    coordinator: Coordinator
    device: torch.device
    local_rank: int = 0
    step: int = 0
    phase: Phase = Phase.IDLE
    # What this rank met, where it cannot continue: a lost peer, or a restored state that was not verified.
    failure: Exception | None = None
    # How it ended, where it ended by itself: at a planned step, or because of a non-finite one. Every rank alike.
    planned: bool = False
    # The run stops with this generation.
    last: bool = False
    bad_step: BadStep | None = None
    # How many collectives this rank has begun in this generation; and how many of them within `translating`.
    collectives: Callable[[], int] = lambda: 0
    translated: int = 0
    # Of the script's, when its loop was given its batch; None before the first.
    before_batch: int | None = None
    _translates: bool = False
    _ended: str | None = None
    _moved: float = 0.0

    def moved(self) -> None:
        """Called by everything that the user's code calls: what it does between two steps is no hang."""
        now = time.monotonic()
        if now - self._moved >= MOVED_EVERY_S:
            self._moved = now
            self.coordinator.moved()

    def end(self, reason: str) -> None:
        """Make every later `check` raise. The first reason stays."""
        if self._ended is None:
            self._ended = reason

    def fail(self, error: BaseException) -> None:
        """This rank has met `error`: later checks raise it. The first reason stays."""
        if isinstance(error, Exception) and self.failure is None and self._ended is None:
            self.failure = error

    def end_as_planned(self, last: bool = False) -> None:
        """The step just finished was the last one (of the run, if `last`) and is saved. Raises GenerationEnded."""
        self.planned, self.last = True, last
        self.end(f"planned at step {self.step}")
        self.check()

    def end_for(self, bad: BadStep, step: int) -> None:
        """Step number `step` (from 1) was non-finite: the run goes back to an earlier one. Raises GenerationEnded."""
        self.bad_step = bad
        self.end(f"{bad} in step {step}")
        self.check()

    @property
    def ended(self) -> str | None:
        return self._ended

    @property
    def broken(self) -> bool:
        """Nothing that is still computed in this generation counts."""
        return self._ended is not None or self.failure is not None

    def check(self) -> None:
        """Raise GenerationEnded or the failure once this generation cannot continue.

        Called by everything that the user's loop calls, so that an `except Exception` in it cannot keep a dead
        generation running.
        """
        if self._ended is not None:
            raise GenerationEnded(self.spec.generation, self._ended)
        if self.failure is not None:
            raise self.failure

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.coordinator.phase(phase)

    def where(self) -> Where:
        return Where(rank=self.spec.rank, step=self.step, generation=self.spec.generation)

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Around collectives: the loss of a peer becomes CollectiveFailed, and is remembered so that a loop that
        swallows the error does not continue with a broken group."""
        begun = None if self._translates else self.collectives()
        self._translates = True
        try:
            yield
        except Exception as error:
            failure = as_collective_failure(error, self.where())
            if failure is None:
                raise
            if self.failure is None:
                self.failure = failure
            self.check()
            raise failure from error
        finally:
            if begun is not None:
                self._translates = False
                self.translated += self.collectives() - begun

    def of_script(self) -> int:
        """Collectives that this rank has begun, but for those of the platform and of the engine: differences count."""
        return self.collectives() - self.translated

    def of_script_in_batch(self) -> int:
        return 0 if self.before_batch is None else self.of_script() - self.before_batch
