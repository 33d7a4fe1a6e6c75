"""The record of one incident: what was lost, how it was noticed, what was done about it and how long each part took."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Incident:
    """`kind` is one of node-lost, node-frozen, worker-lost, worker-frozen, hang, collective-failed, user-error,
    out-of-memory, mesh-refused, anomaly, audit, usage-error, restore-failed, resize, stop. Times are wall clock
    seconds, keyed symptom, detected, decided, fenced, group_ready, state_ready, first_step; a time that has not come
    yet is absent.
    """

    id: int
    kind: str
    generation: int
    world_size: int
    step: int
    evidence: str
    planned: bool = False
    lost_workers: tuple[int, ...] = ()
    lost_nodes: tuple[str, ...] = ()
    action: str = ""
    alternatives: str = ""
    source: str = ""
    next_generation: int | None = None
    next_world_size: int | None = None
    resumed_step: int | None = None
    steps_repeated: int = 0
    also: tuple[str, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)

    def at(self, name: str, now: float) -> Incident:
        """The incident with time `name` set, unless it was set before."""
        if name in self.times:
            return self
        return dataclasses.replace(self, times={**self.times, name: now})

    def to_json(self) -> dict[str, Any]:
        """The journal's form. `seconds` are durations since the symptom."""
        start = self.times.get("symptom", self.times.get("detected", 0.0))
        seconds = {name: round(time - start, 4) for name, time in self.times.items() if name != "symptom"}
        return {**dataclasses.asdict(self), "times": dict(self.times), "seconds": seconds}
