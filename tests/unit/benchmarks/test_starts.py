"""When a new worker was ready, as the journal tells it."""

from __future__ import annotations

from benchmarks.cases.starts import started


def test_a_start_is_timed_from_the_first_event_after_the_fault() -> None:
    told = [("WorkerReady", 9.0), ("WorkerDied", 10.5), ("WorkerReady", 12.0), ("WorkerReady", 13.0)]
    records = [{"type": "event", "event": kind, "now": now} for kind, now in told]
    records.insert(0, {"type": "decision", "generation": 1})
    assert started(records, 10.0, "WorkerDied") == 1.5
    assert started(records, 10.0, "SlotPlaced") is None
    assert started(records[:3], 10.0, "WorkerDied") is None
