"""The journal's records: one schema per type, and the functions that make and read them.

Every record also has the journal's stamps `seq`, `incarnation` and `time` (wall clock seconds). Readers are tolerant:
keys of other versions may be missing or new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from elastic.core import events as ev
from elastic.core.data.sample_ledger import SampleCount
from elastic.core.data.steps import CompletedStep, Range
from elastic.core.incident import Incident
from elastic.core.policy.measured import Measured
from elastic.core.typed_json import encode
from elastic.observe.text import finite

Record = Mapping[str, Any]


class Run(TypedDict, total=False):
    """type "run": the run has begun (status "running") or has ended; the other keys belong to the end."""

    type: str
    run_id: str
    status: str
    attempt: int
    reason: str
    step: int
    loss: float | None
    metrics: Mapping[str, Any]
    checkpoint_step: int | None
    fenced_messages: int
    false_alarms: int
    error: str | None


class Decision(TypedDict):
    """type "decision": a sentence for people, with its figures in `data`."""

    type: str
    kind: str
    sentence: str
    step: int
    generation: int
    world_size: int
    data: Mapping[str, Any]


class GenerationBegan(TypedDict):
    """type "generation" with `first_step`: later steps that the journal has were rolled back. `skips` are all ranges of
    samples that the run leaves out. `mesh`: sizes by axis, where ranks share anything."""

    type: str
    number: int
    world_size: int
    first_step: int
    now: float
    skips: Sequence[Sequence[int]]
    mesh: Mapping[str, int]


class GenerationEnded(TypedDict):
    """type "generation" with `last_step`."""

    type: str
    number: int
    last_step: int


class _StepAlways(TypedDict):
    step: int
    generation: int
    loss: float | None
    time: float
    duration_s: float
    data_wait_s: float
    save_stall_s: float
    straggler_s: float
    samples: int
    positions: Sequence[Range]
    grad_norm: float | None
    learning_rates: Sequence[float]
    metrics: Mapping[str, Any]


class Step(_StepAlways, total=False):
    """One step in a "steps" record; see `CompletedStep`. `anomaly` and `skipped`: the step was not applied. `content`:
    64 bits in hexadecimal form, of a stream. `collectives`: rank 0's, each the fields of a `CollectiveUse`.
    `gradient_parts`: of a step whose gradient noise was measured, `sample_flops`: of the run's first step, see
    `StepReport`. `energy_j`: of all ranks' devices, where all measure it. `audit`: what an audit of the step found.
    `travel`: from this step on, how gradients travel, and what other ways would have cost."""

    metrics_by_rank: Mapping[str, Mapping[str, Any]]
    anomaly: str
    skipped: Sequence[Range]
    content: str
    collectives: Sequence[Sequence[Any]]
    gradient_parts: Sequence[float]
    sample_flops: float
    energy_j: float
    audit: str
    travel: str


class Steps(TypedDict):
    """type "steps": completed steps, in the order in which they were completed."""

    type: str
    steps: Sequence[Step]


class Restore(TypedDict):
    """type "restore": state was restored on all ranks. Bytes are sums over ranks, seconds those of the slowest;
    `bytes_from` has the fields of `elastic.checkpoint.source.BytesRead`. `kept`
    are the micro-batches of the step after `step` that need not be computed again; `again` are the reasons of ranks
    that had computed some and keep none."""

    type: str
    generation: int
    checkpoint: str
    source: str
    step: int
    bytes_read: int
    bytes_from: Mapping[str, int]
    bytes_needed: int
    read_s: float
    install_s: float
    verify_s: float
    kept: int
    again: Sequence[str]


class Checkpoint(TypedDict):
    """type "checkpoint": complete in storage. `stall_s`: how long the save delayed the slowest training thread."""

    type: str
    id: str
    step: int
    bytes: int
    seconds: float
    stall_s: float | None


class Samples(TypedDict):
    """type "samples": see `SampleCount`."""

    type: str
    seen: int
    missing: int
    repeated: int
    skipped: int


class Ledger(TypedDict):
    """type "ledger": the time of one attempt, by owner, in seconds and in accelerator-seconds."""

    type: str
    seconds: Mapping[str, float]
    wall_s: float
    held_s: Mapping[str, float]


class Facts(TypedDict):
    """type "facts": what the run has measured about itself so far, the JSON form of `Measured`; the last one counts."""

    type: str
    measured: Mapping[str, Any]


# --- made by the controller ---


def begin(read: Mapping[int, int]) -> Record:
    """Opens a segment: how many lines of each older segment its writer had read."""
    return {"type": "begin", "read": {str(incarnation): count for incarnation, count in read.items()}}


def run_began(run_id: str, attempt: int) -> Run:
    return {"type": "run", "status": "running", "run_id": run_id, "attempt": attempt}


def run_ended(run_id: str, result: Mapping[str, Any]) -> Record:
    """`result` has the keys of `Run` that belong to the end."""
    return {"type": "run", "run_id": run_id, **result}


def event(happened: ev.Event, now: float, number: int) -> Record:
    """`now` is the time at which the state machine got the event: a replay gives it the same one. `number` counts the
    events of one attempt at the run."""
    return {"type": "event", "now": now, "number": number, **ev.to_json(happened)}


def decision(
    kind: str, sentence: str, *, step: int, generation: int, world_size: int, data: Mapping[str, Any]
) -> Decision:
    return {
        "type": "decision", "kind": kind, "sentence": sentence, "step": step, "generation": generation,
        "world_size": world_size, "data": dict(data),
    }  # fmt: skip


def generation_began(
    number: int, world_size: int, first_step: int, now: float, skips: Iterable[Range], mesh: Mapping[str, int]
) -> GenerationBegan:
    return {
        "type": "generation", "number": number, "world_size": world_size, "first_step": first_step, "now": now,
        "skips": [list(range_) for range_ in skips], "mesh": mesh,
    }  # fmt: skip


def generation_ended(number: int, last_step: int) -> GenerationEnded:
    return {"type": "generation", "number": number, "last_step": last_step}


def steps(completed: Sequence[Step]) -> Steps:
    return {"type": "steps", "steps": completed}


def step(done: CompletedStep, now: float) -> Step:
    """JSON has no non-finite numbers: they are written as null."""
    record: Step = {
        "step": done.step, "generation": done.generation, "loss": finite(done.loss), "time": round(now, 3),
        "duration_s": round(done.duration_s, 5), "data_wait_s": round(done.data_wait_s, 5),
        "save_stall_s": round(done.save_stall_s, 5), "straggler_s": round(done.straggler_s, 5),
        "samples": done.samples, "positions": done.positions,
        "grad_norm": _writable(done.grad_norm), "learning_rates": [_writable(rate) for rate in done.learning_rates],
        "metrics": {name: _writable(value) for name, value in done.metrics.items()},
    }  # fmt: skip
    if done.metrics_by_rank:
        record["metrics_by_rank"] = {
            name: {str(rank): _writable(value) for rank, value in values.items()}
            for name, values in done.metrics_by_rank.items()
        }
    if done.anomaly:
        record |= {"anomaly": done.anomaly, "skipped": done.skipped}
    if done.content:
        record["content"] = f"{done.content:016x}"
    if done.collectives:
        record["collectives"] = [use.to_json() for use in done.collectives]
    if done.gradient_parts:
        record["gradient_parts"] = [_writable(value) for value in done.gradient_parts]
    if done.sample_flops:
        record["sample_flops"] = done.sample_flops
    if done.energy_j:
        record["energy_j"] = round(done.energy_j, 3)
    if done.audit:
        record["audit"] = done.audit
    if done.travel:
        record["travel"] = done.travel
    return record


def restore(reports: Sequence[Mapping[str, Any]]) -> Restore:
    """From the restore reports of all ranks of one generation."""
    first = reports[0]
    return {
        "type": "restore", "generation": first["generation"], "checkpoint": first["checkpoint"],
        "source": first["source"], "step": first["step"],
        "bytes_read": sum(report["bytes_read"] for report in reports),
        "bytes_from": {place: sum(report["bytes_from"][place] for report in reports) for place in first["bytes_from"]},
        "bytes_needed": sum(report["bytes_needed"] for report in reports),
        "read_s": round(max(report["read_s"] for report in reports), 4),
        "install_s": round(max(report["install_s"] for report in reports), 4),
        "verify_s": round(max(report["verify_s"] for report in reports), 4),
        "kept": sum(report["kept"] for report in reports),
        "again": sorted({report["again"] for report in reports if report["again"]}),
    }  # fmt: skip


def checkpoint(identifier: str, step: int, size: int, seconds: float, stall_s: float | None = None) -> Checkpoint:
    return {
        "type": "checkpoint", "id": identifier, "step": step, "bytes": size, "seconds": round(seconds, 4),
        "stall_s": stall_s,
    }  # fmt: skip


def incident(run_id: str, detector: str, closed: Incident, restored: Record | None) -> dict[str, Any]:
    """`detector` is the part that noticed it first; `restored` the "restore" record of the generation that followed."""
    record = {"type": "incident", "run": run_id, "detector": detector, **closed.to_json()}
    if restored is not None:
        keys = ("bytes_read", "bytes_from", "bytes_needed", "read_s", "install_s", "verify_s")
        record["restore"] = {key: restored[key] for key in keys}
    return record


def facts(measured: Measured) -> Facts:
    return {"type": "facts", "measured": encode(measured)}


def samples(counted: SampleCount) -> Samples:
    return {
        "type": "samples", "seen": counted.seen, "missing": counted.missing, "repeated": counted.repeated,
        "skipped": counted.skipped,
    }  # fmt: skip


def ledger(seconds: Mapping[str, float], wall_s: float, held_s: Mapping[str, float]) -> Ledger:
    return {"type": "ledger", "seconds": seconds, "wall_s": wall_s, "held_s": held_s}


# --- for readers ---


def of(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one type, in order."""
    return [record for record in records if record.get("type") == kind]


def begins_generation(record: Record) -> bool:
    return record.get("type") == "generation" and "first_step" in record


def steps_of(records: Iterable[Record]) -> Iterator[Record]:
    """Completed steps in the order in which they were written, those included that were rolled back later."""
    for record in of(records, "steps"):
        yield from (step for step in record.get("steps") or () if "step" in step)


def skips_of(record: Record) -> tuple[Range, ...]:
    """The ranges of samples that the run skips, by a "generation" record."""
    return tuple((start, stop) for start, stop in record.get("skips") or ())


def undone_by(record: Record) -> tuple[int, int] | None:
    """(generation, step) after which the state of this and of earlier generations does not count any more, by the
    record of an anomaly or of an audit that failed; None for every other record."""
    if record["type"] == "event" and record.get("event") == "AnomalyFound":
        return int(record["generation"]), int(record["step"])
    found = (record.get("data") or {}).get("undone") if record["type"] == "decision" else None
    return None if found is None else (int(found[0]), int(found[1]))


def _writable(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value
