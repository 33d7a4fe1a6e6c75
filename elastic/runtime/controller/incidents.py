"""Incident records, completed with runtime facts: bytes moved, and when the lost steps were caught up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.incident import Incident
from elastic.observe import records

# What detects each kind of incident first.
_DETECTORS = {
    "collective-failed": "a survivor's collective",
    "hang": "progress watch",
    "user-error": "the training function",
    "out-of-memory": "the training function",
    "usage-error": "the training function",
    "mesh-refused": "the engine",
    "anomaly": "the ranks' losses and gradients",
    "audit": "an audit",
    "worker-frozen": "worker heartbeats",
    "worker-lost": "process watch",
    "node-frozen": "node heartbeats",
    "node-lost": "the connection to the node's agent, a survivor's collective, or node heartbeats",
    "restore-failed": "the verification of the restored state",
    "resize": "scaling policy",
    "stop": "the user",
}


class IncidentBook:
    """Writes each incident when it is closed, and again when its lost steps have been repeated."""

    def __init__(self, note: Callable[[records.Record], None], run_id: str) -> None:
        self._note = note
        self._run_id = run_id
        self._restores: dict[int, Mapping[str, Any]] = {}
        self._open: dict[str, Any] | None = None

    def restored(self, restore: Mapping[str, Any]) -> None:
        """The summed-up restore of one generation (a "restore" record)."""
        self._restores = {restore["generation"]: restore}

    def close(self, incident: Incident) -> None:
        detector = _DETECTORS.get(incident.kind, incident.kind)
        restore = self._restores.get(incident.next_generation or -1)
        record = records.incident(self._run_id, detector, incident, restore)
        self._note(record)
        self._open = record if incident.steps_repeated else None

    def step_done(self, step: int, now: float) -> None:
        """A complete step of the run."""
        record = self._open
        if record is not None and step >= record["resumed_step"] + record["steps_repeated"]:
            times = {**record["times"], "caught_up": now}
            seconds = {**record["seconds"], "caught_up": round(now - times["symptom"], 4)}
            self._note({**record, "times": times, "seconds": seconds})
            self._open = None
