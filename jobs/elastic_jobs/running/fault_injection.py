"""Injection of faults by step into a local cluster, on a thread of its own while the run is followed."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from elastic_cluster.chaos import Breakable, Chaos, Injector
from elastic_cluster.source import ClusterError, NodeInfo

from elastic.core.errors import ElasticError, UsageError
from elastic_jobs.display import Display
from elastic_jobs.running.handle import RunHandle

# How long one wait for a step lasts before the thread checks whether to stop.
_WAIT_S = 0.5


def parse_faults(text: str | None) -> Chaos:
    """Raises UsageError."""
    try:
        return Chaos.parse(text or "")
    except ValueError as error:
        raise UsageError(f"--chaos: {error}") from error


class Faults:
    """1. `start`; 2. `stop`, which returns the faults that are left; and again. An injection is never cut short."""

    def __init__(self, plan: Chaos, cluster: Breakable, handle: RunHandle) -> None:
        self._plan = plan
        self._injector = injector(cluster, handle)
        self._handle = handle
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        # For the summary: each fault, its node, and the wall clock when its injection began.
        self.injected: list[dict[str, Any]] = []

    def start(self, display: Display) -> None:
        self._leave.clear()
        self._thread = threading.Thread(target=self._run, args=(display,), name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> Chaos:
        self._leave.set()
        if self._thread is not None:
            self._thread.join()
        return self._plan

    def _run(self, display: Display) -> None:
        try:
            while self._plan.faults and self._reached(self._plan.faults[0].step):
                display.note(self._inject())
        except ElasticError as error:
            display.note(f"no more faults are injected: {error}")

    def _inject(self) -> str:
        fault, self._plan = self._plan.faults[0], Chaos(self._plan.faults[1:])
        try:
            at = time.time()
            node = self._injector.apply(fault).name
            self.injected.append({"fault": str(fault), "node": node, "at": round(at, 4)})
            return f"injected {fault}: {node}"
        except ClusterError as error:
            # Reported; a failed injection must not end the run that it was meant to test.
            return f"could not inject {fault}: {error}"

    def _reached(self, step: int) -> bool:
        while not self._leave.is_set():
            if self._handle.wait_step(step, _WAIT_S):
                return not self._leave.is_set()
            if self._handle.result(0.0) is not None:
                return False
        return False


def injector(cluster: Breakable, handle: RunHandle) -> Injector:
    """Faults find workers and the controller where the run itself reports them."""

    def workers() -> list[Mapping[str, Any]]:
        return [worker for worker in handle.progress().get("workers") or () if worker.get("rank") is not None]

    def worker_pid(target: str | None, node: NodeInfo | None) -> int:
        for worker in workers():
            if str(worker["rank"]) == target or (node is not None and worker["node"] == node.node_id):
                return int(worker["pid"])
        raise ClusterError(f"no worker has rank {target}" if target is not None else "that node carries no worker")

    def controller_pid() -> int:
        return int(handle.progress()["controller_pid"])

    def carrying() -> Collection[str]:
        return {str(worker["node"]) for worker in workers()}

    return Injector(cluster, worker_pid, controller_pid, carrying)
