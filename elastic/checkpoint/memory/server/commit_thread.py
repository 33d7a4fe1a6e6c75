"""A thread that works on the newest commit of one rank, one at a time, until it is retired or stopped."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic.core.checkpoint.manifest import Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One commit: step `step` is in the segment with this number."""

    step: int
    number: int
    extra_state: Mapping[str, Json] | None


class CommitThread(threading.Thread, ABC):
    """Base of `Sender` and `Hasher`, whose `_work` takes jobs by `_next`. An error that `_work` raises is a loss.

    `send` replaces a job that has not been taken yet: only the newest commit matters. `on_change` is called from this
    thread whenever `sent_step` or `problem` has changed.
    """

    def __init__(self, name: str, on_change: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.sent_step = -1
        self.sent_bytes = 0
        self.problem: str | None = None
        # Which target was replaced by which, and why.
        self.moved: str | None = None
        # The target was given up, perhaps because it lacks the memory.
        self.lost = self.lacks_memory = False
        self._on_change = on_change
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._retiring = self._stopped = False

    def send(self, job: Job) -> None:
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def retire(self) -> None:
        """End the thread once the last commit is done, or the first attempt at it has failed."""
        with self._changed:
            self._retiring = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread soon, without its last commit. Does not wait for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._interrupt()

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # A thread that ended silently would leave every later snapshot incomplete.
            logger.exception("%s ends", self.name)
            self.lost, self.problem = True, self._refusal(repr(error))
            self._on_change()

    @abstractmethod
    def _work(self) -> None: ...

    @abstractmethod
    def _refusal(self, why: str) -> str:
        """`problem`, of an error."""

    def _interrupt(self) -> None:
        """Wake `run` from I/O. Called with the lock held."""

    def _next(self, done: Job | None) -> Job | None:
        """Wait for a job other than `done`; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._retiring or self._job is not done)
            return None if self._stopped or self._job is done else self._job
