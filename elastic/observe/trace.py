"""A run as trace events for Perfetto or chrome://tracing.

The format is the JSON of Google's "Trace Event Format": complete events ("X") with begin and duration in microseconds,
instants ("i") and counters ("C"). One track each for steps, incidents with their phases, checkpoints and decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from elastic.observe.text import clean, finite

Record = Mapping[str, Any]
Event = dict[str, Any]

_STEPS, _INCIDENTS, _CHECKPOINTS, _DECISIONS = 1, 2, 3, 4
_TRACKS = {_STEPS: "steps", _INCIDENTS: "incidents", _CHECKPOINTS: "checkpoints", _DECISIONS: "decisions"}
# The times of an incident in their order, and what ends at each.
_MARKS = (
    ("symptom", ""),
    ("detected", "detect"),
    ("decided", "decide"),
    ("group_ready", "rebuild the process group"),
    ("state_ready", "restore and verify"),
    ("first_step", "first step"),
    ("caught_up", "repeat steps"),
)


def trace(records: Sequence[Record]) -> dict[str, Any]:
    """{"traceEvents": [...], "displayTimeUnit": "ms"}; times count from the first record."""
    began = min((float(record["time"]) for record in records if "time" in record), default=0.0)
    events: list[Event] = [
        {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        for track, name in _TRACKS.items()
    ]
    incidents: dict[Any, Record] = {}
    for record in records:
        match record.get("type"):
            case "steps":
                events += _steps(record, began)
            case "incident":
                # A later record of the same incident is more complete.
                incidents[record.get("incarnation"), record.get("id")] = record
            case "checkpoint":
                events += _checkpoint(record, began)
            case "decision":
                events.append(_instant(record, began))
    for record in incidents.values():
        events += _incident(record, began)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _steps(record: Record, began: float) -> Iterator[Event]:
    for step in record.get("steps") or ():
        at, seconds = finite(step.get("time")), finite(step.get("duration_s"))
        if at is None or seconds is None:
            continue
        details = {key: step.get(key) for key in ("generation", "loss", "samples", "grad_norm", "data_wait_s")}
        yield _span(_STEPS, f"step {step.get('step')}", at - seconds, seconds, began, details)
        if finite(step.get("loss")) is not None:
            yield _event("C", _STEPS, "loss", at, began, args={"loss": step["loss"]})


def _incident(record: Record, began: float) -> Iterator[Event]:
    times = record.get("times") or {}
    reached = [(at, what) for key, what in _MARKS if (at := finite(times.get(key))) is not None]
    details = {
        key: record.get(key) for key in ("kind", "evidence", "action", "world_size", "next_world_size", "source")
    }
    if reached:
        last = max(at for at, _ in reached)
        yield _span(
            _INCIDENTS, clean(record.get("kind", "incident")), reached[0][0], last - reached[0][0], began, details
        )
    for (begin, _), (end, what) in pairwise(reached):
        yield _span(_INCIDENTS, what, begin, max(0.0, end - begin), began, {})


def _checkpoint(record: Record, began: float) -> Iterator[Event]:
    at, seconds = finite(record.get("time")), finite(record.get("seconds")) or 0.0
    if at is not None:
        details = {key: record.get(key) for key in ("bytes", "stall_s")}
        yield _span(_CHECKPOINTS, clean(record.get("id", "checkpoint")), at - seconds, seconds, began, details)


def _instant(record: Record, began: float) -> Event:
    return _event("i", _DECISIONS, clean(record.get("sentence", "")), float(record["time"]), began, s="t")


def _span(track: int, name: str, at: float, seconds: float, began: float, args: Mapping[str, Any]) -> Event:
    return _event("X", track, name, at, began, dur=round(seconds * 1e6), args=dict(args))


def _event(kind: str, track: int, name: str, at: float, began: float, **more: Any) -> Event:
    return {"ph": kind, "pid": 1, "tid": track, "name": name, "ts": round((at - began) * 1e6), **more}
