"""A run as the front ends see it: the interface to the runtime, and a fake of it for tests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

# A controller that is lost before it has journaled a stop has forgotten it, so the stop is repeated.
STOP_AGAIN_S = 20.0


class RunHandle(Protocol):
    """Made by `elastic.runtime.driver.client`. Methods wait for a controller that is restarting; any of them raises an
    ElasticError if the run stays unreachable.

    1. `progress` as often as wanted; cheap
    2. `wait_step`, `result` to wait
    3. `stop`, repeated until the run ends; `result` then has status "stopped"
    """

    @property
    def run_id(self) -> str: ...

    def progress(self) -> Mapping[str, Any]:
        """The present figures. Keys (absent or None if unknown): status, step (finished steps), max_steps, loss,
        learning_rate (of the first group), grad_norm, steps_per_s, tokens_per_s or samples_per_s, world_size, mesh
        (sizes by axis, where ranks share anything), generation, last_checkpoint, last_checkpoint_step, doing (a
        sentence while the run does anything but train), asking_for (the requested nodes that are missing, as text),
        incidents (a count), stragglers (each with worker, rank, node, factor)."""
        ...

    def wait_step(self, step: int, timeout_s: float) -> bool:
        """True as soon as `step` steps have finished; False at the timeout or if the run has ended before."""
        ...

    def result(self, timeout_s: float) -> Mapping[str, Any] | None:
        """None while the run is in progress; after its end {status, step, loss, reason}."""
        ...

    def stop(self, reason: str) -> None:
        """Ask for a planned end with a last checkpoint. Returns at once."""
        ...


class FakeHandle:
    """A fake run. `advance` moves it, from any thread."""

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
