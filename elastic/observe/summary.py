"""The summary of a run as one JSON object: a pure function of its journal.

Tolerant on purpose: it reads journals of runs in progress, of crashed runs, and of other versions. A missing value is
None or empty, never guessed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from elastic.observe.laws.compute import compute_ledger
from elastic.observe.laws.gradient_noise import noise_scale
from elastic.observe.records import Record, of, steps_of
from elastic.observe.text import finite

Json = dict[str, Any]

# Names of the summary, and the times of an incident that they are taken from.
_MARKS = {
    "detected": "detected",
    "decided": "decided",
    "rebuilt": "group_ready",
    "restored": "state_ready",
    "first_step": "first_step",
    "caught_up": "caught_up",
}
_SAMPLES = ("seen", "missing", "repeated", "skipped")
_STAMPS = {"seq", "incarnation", "time", "type"}


def summarize(records: Iterable[Record], watts: float | None = None) -> Json:
    """Keys: run_id, status, reason, steps, final_loss, error, started_at, ended_at, wall_s, generations, incidents,
    samples, checkpoints, save_stall_s, attempts, time_ledger, calibration (of each node the verdict and its reasons),
    compute (a `ComputeLedger`), gradient_noise (a `NoiseScale`), controllers. `watts`: see `ComputeLedger.at`. Times
    are wall clock seconds."""
    all_records = list(records)
    attempts = _attempts(all_records)
    run = _run(all_records, attempts[-1])
    times = [float(record["time"]) for record in all_records if "time" in record]
    generations = _generations(all_records)
    ledger = compute_ledger(all_records, _by_owner(attempts, lambda last: last.get("held_s") or {})).at(watts)
    return {
        "run_id": run.get("run_id"),
        "status": run.get("status", "unknown"),
        "reason": run.get("reason"),
        "steps": _steps(run, all_records),
        "final_loss": finite(run.get("loss")),
        "error": _error(attempts[-1]),
        "started_at": times[0] if times else None,
        "ended_at": times[-1] if times else None,
        "wall_s": round(times[-1] - times[0], 3) if times else None,
        "generations": generations,
        "incidents": [incident_summary(r) for attempt in attempts for r in _latest(of(attempt, "incident"), "id")],
        "samples": {key: _merged(of(all_records, "samples")).get(key) for key in _SAMPLES},
        "checkpoints": _checkpoints(all_records),
        "save_stall_s": _stalls(of(all_records, "checkpoint")),
        "attempts": len(attempts),
        "time_ledger": time_ledger(attempts),
        "calibration": _calibration(all_records),
        "compute": ledger.to_json() if ledger.known else None,
        "gradient_noise": None if (noise := noise_scale(all_records)) is None else noise.to_json(),
        "controllers": max((int(record.get("incarnation", 0)) for record in all_records), default=0),
    }


def incident_summary(record: Record) -> Json:
    """One incident: the loss, the action, and seconds from the first symptom to each mark."""
    return {
        "id": record.get("id"),
        "kind": record.get("kind", "unknown"),
        "planned": bool(record.get("planned", False)),
        "lost": lost(record),
        "evidence": record.get("evidence", ""),
        "action": record.get("action", ""),
        "at": _start(record),
        "step": record.get("step"),
        "generation": record.get("generation"),
        "next_generation": record.get("next_generation"),
        "world_size": record.get("world_size"),
        "next_world_size": record.get("next_world_size"),
        "seconds": incident_seconds(record),
        "steps_repeated": record.get("steps_repeated"),
        "resumed_step": record.get("resumed_step"),
        "source": record.get("source") or None,
        "bytes_from": (record.get("restore") or {}).get("bytes_from"),
    }


def incident_seconds(record: Record) -> dict[str, float | None]:
    """Seconds from the symptom (or the detection, where no symptom has a time) to each mark; None: not reached."""
    start, times = _start(record), record.get("times") or {}
    return {
        name: round(times[key] - start, 4) if start is not None and finite(times.get(key)) is not None else None
        for name, key in _MARKS.items()
    }


# A fault that removes no worker cannot be the cause of a generation's end.
_HARMLESS = ("add-node", "kill-control-store", "restart-control-store")


def with_result(summary: Mapping[str, Any], run_id: str, result: Mapping[str, Any]) -> Json:
    """The summary with what the controller reported at the end: the journal may end earlier (storage failing)."""
    known = {"status": result.get("status"), "reason": result.get("reason") or None, "steps": result.get("step")}
    known["final_loss"] = finite(result.get("loss"))
    return {**summary, "run_id": run_id, **{key: value for key, value in known.items() if value is not None}}


def with_faults(summary: Mapping[str, Any], faults: Sequence[Mapping[str, Any]]) -> Json:
    """The summary with the faults {"fault", "node", "at"} that were injected from outside: each unplanned incident
    that follows one gets `seconds_from_fault`, measured from the fault itself and not from its first symptom."""
    incidents = [_with_fault(incident, faults, summary["incidents"]) for incident in summary["incidents"]]
    return {**summary, "incidents": incidents, "faults": [dict(fault) for fault in faults]}


def _with_fault(incident: Json, faults: Sequence[Mapping[str, Any]], incidents: Sequence[Json]) -> Json:
    at = incident["at"]
    # The previous incident: a fault before it belongs to that one.
    earlier = max((i["at"] for i in incidents if at and i["at"] and i["at"] < at), default=0.0)
    striking = [fault for fault in faults if not str(fault["fault"]).startswith(_HARMLESS)]
    causes = [fault for fault in striking if at is not None and earlier < fault["at"] <= at]
    if incident["planned"] or not causes:
        return incident
    shift = at - causes[0]["at"]
    seconds = {name: None if s is None else round(s + shift, 4) for name, s in incident["seconds"].items()}
    return {**incident, "fault": causes[0]["fault"], "seconds_from_fault": seconds}


def lost(record: Record) -> str:
    """In words: "node 3f2a (worker 2)", "worker 1", or "" for nothing."""
    if isinstance(record.get("lost"), str):
        return str(record["lost"])
    nodes, workers = record.get("lost_nodes") or (), record.get("lost_workers") or ()
    who = _listed("worker", [str(worker) for worker in workers])
    where = _listed("node", [str(node)[:8] for node in nodes])
    return f"{where} ({who})" if who and where else where or who


def time_ledger(attempts: Sequence[Sequence[Record]]) -> dict[str, float]:
    """Owner -> seconds: the last ledger of each attempt (it covers the whole attempt), and the time between attempts
    as "paused"."""
    total = _by_owner(attempts, _seconds)
    gaps = [_time(later[0]) - _time(earlier[-1]) for earlier, later in pairwise(attempts)]
    return {**total, "paused": total.get("paused", 0.0) + sum(gaps)} if total and gaps else total


# Owners under the names of journals of 0.1.
_RENAMED = {"prove": "verify"}


def _by_owner(attempts: Iterable[Sequence[Record]], read: Callable[[Record], Mapping[str, Any]]) -> dict[str, float]:
    """What is read of the last ledger of each attempt, added up."""
    total: dict[str, float] = {}
    for attempt in attempts:
        for owner, value in read(next(reversed(of(attempt, "ledger")), {})).items():
            if finite(value) is not None:
                name = _RENAMED.get(owner, str(owner))
                total[name] = total.get(name, 0.0) + float(value)
    return total


def _seconds(ledger: Record) -> Mapping[str, Any]:
    nested = next(
        (ledger[key] for key in ("seconds", "owners", "ledger") if isinstance(ledger.get(key), Mapping)), None
    )
    return nested if nested is not None else {key: value for key, value in ledger.items() if key not in _STAMPS}


def _attempts(records: Sequence[Record]) -> list[list[Record]]:
    """At least one. A resumed run begins again with status "running"; incidents are numbered anew in each attempt."""
    attempts: list[list[Record]] = [[]]
    begun = False
    for record in records:
        if record.get("type") == "run" and record.get("status") == "running":
            if begun:
                # Its controller's "begin" record comes just before and belongs to it.
                attempts.append([attempts[-1].pop()] if attempts[-1][-1].get("type") == "begin" else [])
            begun = True
        attempts[-1].append(record)
    return attempts


def _run(records: Sequence[Record], attempt: Sequence[Record]) -> Json:
    """The run's outcome from its last attempt; without one, the last known step."""
    steps = list(steps_of(records))
    last = {key: steps[-1].get(key) for key in ("step", "loss")} if steps else {}
    names = {"run_id": _merged(of(records, "run")).get("run_id")}
    return {**names, **last, **_merged(of(attempt, "run"))}


def _error(records: Sequence[Record]) -> Json | None:
    """The last error of user code, with its traceback."""
    errors = [record for record in of(records, "event") if record.get("event") == "UserCodeFailed"]
    keys = ("worker", "step", "generation", "error", "traceback")
    return {key: errors[-1].get(key) for key in keys} if errors else None


def _time(record: Record) -> float:
    return float(record.get("time", 0.0))


def _merged(records: Iterable[Record]) -> Json:
    """Later values win; None does not override a value."""
    merged: Json = {}
    for record in records:
        merged.update({key: value for key, value in record.items() if value is not None})
    return merged


def _latest(records: Iterable[Record], key: str) -> list[Json]:
    """One merged record per value of `key`, in the order of first appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record.get(key), []).append(record)
    return [_merged(group) for group in groups.values()]


def _generations(records: Sequence[Record]) -> list[Json]:
    """A generation that ended abruptly has no record of its last step; the step records have it."""
    last: dict[Any, int] = {}
    for step in steps_of(records):
        last[step.get("generation")] = max(int(step["step"]), last.get(step.get("generation"), 0))
    keys = ("number", "world_size", "mesh", "first_step")
    return [
        {**{key: merged.get(key) for key in keys}, "last_step": merged.get("last_step", last.get(merged.get("number")))}
        for merged in _latest(of(records, "generation"), "number")
    ]


def _calibration(records: Sequence[Record]) -> Json:
    """Of each node that was measured when it joined its last verdict."""
    found = [record.get("data") or {} for record in of(records, "decision") if record.get("kind") == "calibration"]
    return {
        str(data["node"]): {"state": data["state"], "reasons": data.get("reasons") or []}
        for data in found
        if "node" in data and "state" in data
    }


def _checkpoints(records: Sequence[Record]) -> list[Json]:
    keys = ("id", "step", "bytes", "seconds", "stall_s")
    return [{key: merged.get(key) for key in keys} for merged in _latest(of(records, "checkpoint"), "id")]


def _stalls(checkpoints: Sequence[Record]) -> Json:
    """How long saves delayed the training thread."""
    stalls = [stall for record in checkpoints if (stall := finite(record.get("stall_s"))) is not None]
    return {
        "saves": len(stalls),
        "median": round(statistics.median(stalls), 4) if stalls else None,
        "max": round(max(stalls), 4) if stalls else None,
        "total": round(sum(stalls), 4),
    }


def _steps(run: Json, records: Sequence[Record]) -> int | None:
    if run.get("step") is not None:
        return int(run["step"])
    seen = [int(r["last_step"]) for r in of(records, "generation") if r.get("last_step") is not None]
    return max(seen, default=None)


def _start(record: Record) -> float | None:
    times = record.get("times") or {}
    return finite(times.get("symptom", times.get("detected", record.get("time"))))


def _listed(noun: str, names: Sequence[str]) -> str:
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
