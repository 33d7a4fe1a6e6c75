"""A small journal that the tests of its readers share."""

from __future__ import annotations

from typing import Any

from elastic.core.incident import Incident

INCIDENT = Incident(
    id=1,
    kind="node-lost",
    generation=1,
    world_size=4,
    step=41,
    evidence="no heartbeat for 1.5 s",
    lost_workers=(2,),
    lost_nodes=("abcdef0123456789",),
    action="continue with the survivors",
    source="storage",
    next_generation=2,
    next_world_size=3,
    resumed_step=40,
    steps_repeated=1,
    times={
        "symptom": 110.0,
        "detected": 110.25,
        "decided": 110.5,
        "group_ready": 111.0,
        "state_ready": 111.5,
        "first_step": 112.0,
    },
)


def journal() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [
        {"type": "begin", "read": {}},
        {"type": "run", "run_id": "r1", "status": "running", "max_steps": 100},
        {"type": "decision", "sentence": "4 workers ready", "generation": 1, "world_size": 4, "step": 0},
        {"type": "generation", "number": 1, "world_size": 4, "first_step": 1, "mesh": {"dp": 2, "tp": 2}},
        {"type": "checkpoint", "id": "c40", "step": 40, "bytes": 12_300_000, "seconds": 0.5, "stall_s": 0.01},
        {"type": "checkpoint", "id": "c80", "step": 80, "bytes": 12_300_000, "seconds": 0.5, "stall_s": 0.03},
        {"type": "generation", "number": 1, "last_step": 41},
        {"type": "incident", **INCIDENT.to_json()},
        {"type": "generation", "number": 2, "world_size": 3, "first_step": 41, "last_step": 100},
        {"type": "samples", "seen": 2400, "missing": 0, "repeated": 0},
        {"type": "ledger", "seconds": {"productive": 15.0, "detect": 0.25, "restore": 3.75}},
        {"type": "run", "status": "finished", "step": 100, "loss": 2.5},
    ]
    return [{"seq": i + 1, "incarnation": 1, "time": 100.0 + i, **r} for i, r in enumerate(records)]
