"""Injects faults by step into a local cluster, from a thread of its own while the run is followed."""

from __future__ import annotations

import threading
from typing import Any

from jobs.backend import FaultPlan
from jobs.display import Display
from jobs.handle import RunHandle

# How long one wait for a step lasts before the thread looks whether it should leave.
_WAIT_S = 0.5


class FaultThread:
    """1. `start`; 2. `stop`, which gives what has not been injected. An injection is never cut short."""

    def __init__(self, plan: FaultPlan, cluster: Any, handle: RunHandle, display: Display) -> None:
        self._plan = plan
        self._cluster = cluster
        self._handle = handle
        self._display = display
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> str:
        self._leave.set()
        self._thread.join()
        return self._plan.remaining()

    def _run(self) -> None:
        try:
            while (step := self._plan.next_step()) is not None and self._reached(step):
                self._display.note(f"fault at step {step}: {self._plan.apply_next(self._cluster)}")
        # A fault that cannot be injected must not be silent, and must not end the run that it was meant to test.
        except Exception as error:  # noqa: BLE001
            self._display.note(f"no more faults are injected: {error}")

    def _reached(self, step: int) -> bool:
        while not self._leave.is_set():
            if self._handle.wait_step(step, _WAIT_S):
                return not self._leave.is_set()
            if self._handle.result(0.0) is not None:
                return False
        return False
