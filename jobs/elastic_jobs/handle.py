"""A run as the command line sees it: the seam to the runtime, and a fake of it for tests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

# A controller that is lost before it has written a stop down has forgotten it, so it is told again.
STOP_AGAIN_S = 20.0


class RunHandle(Protocol):
    """Made by `elastic.runtime.driver.client`. Any method may raise an ElasticError when the run cannot be reached for
    good; a controller that is being restarted is waited for inside.

    1. `progress` as often as wanted; cheap
    2. `wait_step`, `result` to wait
    3. `stop`, again where it has not been heard; `result` then gives status "stopped"
    """

    @property
    def run_id(self) -> str: ...

    def progress(self) -> Mapping[str, Any]:
        """What is known now. Keys (absent or None where unknown): status, step (finished steps), max_steps, loss,
        tokens_per_s, world_size, generation, last_checkpoint, last_checkpoint_step, doing (a sentence while the run
        does anything but train), asking_for (in words, the nodes that are wanted and not there), incidents (a count),
        stragglers (each with worker, rank, node, factor)."""
        ...

    def wait_step(self, step: int, timeout_s: float) -> bool:
        """True as soon as `step` steps have finished; False at the timeout or when the run has ended before."""
        ...

    def result(self, timeout_s: float) -> Mapping[str, Any] | None:
        """None while the run goes on; after its end {status, step, loss, reason}."""
        ...

    def stop(self, reason: str) -> None:
        """Ask for a planned end with a last checkpoint. Returns at once."""
        ...


class FakeHandle:
    """A run of the imagination. `advance` moves it, from any thread."""

    def __init__(self, run_id: str = "fake", max_steps: int = 10) -> None:
        self._run_id = run_id
        self._changed = threading.Condition()
        self._progress: dict[str, Any] = {"status": "running", "step": 0, "max_steps": max_steps, "incidents": 0}
        self._result: dict[str, Any] | None = None
        self.stop_reason: str | None = None

    @property
    def run_id(self) -> str:
        return self._run_id

    def advance(self, **changes: Any) -> None:
        with self._changed:
            self._progress.update(changes)
            self._changed.notify_all()

    def end(self, status: str, reason: str = "", **more: Any) -> None:
        with self._changed:
            self._progress["status"] = status
            keep = {key: self._progress.get(key) for key in ("step", "loss")}
            self._result = {"status": status, "reason": reason, **keep, **more}
            self._changed.notify_all()

    def progress(self) -> Mapping[str, Any]:
        with self._changed:
            return dict(self._progress)

    def wait_step(self, step: int, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._progress["step"] >= step or self._result is not None, timeout_s)
            return bool(self._progress["step"] >= step)

    def result(self, timeout_s: float) -> Mapping[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, timeout_s)
            return self._result

    def stop(self, reason: str) -> None:
        self.stop_reason = reason
        self.end("stopped", reason)
