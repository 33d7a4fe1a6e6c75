"""A run's history as sentences with times: what happened, what was decided, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.core.wording import plural
from elastic.observe.records import Record
from elastic.observe.summary import incident_seconds, lost
from elastic.observe.text import clean, clock, date, duration, number, origin, outcome, size


@dataclass(frozen=True)
class Line:
    """One sentence. `time` is wall clock seconds, `offset_s` seconds since the run's first record."""

    time: float
    offset_s: float
    kind: str
    sentence: str
    step: int | None = None
    generation: int | None = None
    world_size: int | None = None

    def __str__(self) -> str:
        known = {"gen": self.generation, "world": self.world_size, "step": self.step}
        where = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        return f"{clock(self.time)} {self.offset_s:+9.2f} s  " + (f"[{where}] " if where else "") + self.sentence


def story(records: Iterable[Record], *, everything: bool = False) -> list[Line]:
    """Decisions, incidents, controllers and the run's state; with `everything` also each checkpoint."""
    lines: list[Line] = []
    start: float | None = None
    status: object = None
    known = list(records)
    # An incident is written again when its lost steps have been repeated: only its last record is shown.
    last_word = {record.get("id"): record for record in known if record.get("type") == "incident"}
    for record in known:
        if record.get("type") == "incident" and record is not last_word[record.get("id")]:
            continue
        time = float(record.get("time", 0.0))
        start = time if start is None else start
        # Only changes of the run's status are shown.
        if record.get("type") == "run":
            if record.get("status") in (None, status):
                continue
            status = record["status"]
        sentence = _sentence(record, everything)
        if sentence:
            lines.append(_line(record, time, time - start, sentence))
        lines += [_line(record, time, time - start, row) for row in (*_options(record), *_meshes(record))]
    return lines


def heading(run_id: str, records: Iterable[Record]) -> str:
    """ "run X, begun 2026-01-02 03:04:05 UTC"."""
    first = next(iter(records), None)
    return f"run {run_id}, begun {date(float(first['time']))}" if first else f"run {run_id}: nothing has happened yet"


def incident_sentence(record: Record) -> str:
    """What was lost, what was done, and how long each part took."""
    what = clean(lost(record))
    head = f"incident {record.get('id', '?')}: {clean(record.get('kind', 'unknown'))}" + (f", {what}" if what else "")
    return "; ".join(part for part in (head, *_incident_parts(record)) if part)


def _incident_parts(record: Record) -> Iterator[str]:
    yield clean(record.get("action") or "")
    before, after = record.get("world_size"), record.get("next_world_size")
    if before is not None and after is not None:
        yield f"world size {before} -> {after}"
    marks = {name.replace("_", " "): value for name, value in incident_seconds(record).items() if value is not None}
    yield ", ".join(f"{name} after {duration(value)}" for name, value in marks.items())
    if record.get("steps_repeated") is not None:
        yield f"{plural(int(record['steps_repeated']), 'step')} repeated"
    if record.get("source"):
        yield f"state from {origin(record['source'], (record.get('restore') or {}).get('bytes_from'))}"


def _line(record: Record, time: float, offset_s: float, sentence: str) -> Line:
    where = {key: record[key] for key in ("step", "generation", "world_size") if isinstance(record.get(key), int)}
    return Line(time, offset_s, str(record.get("type", "")), sentence, **where)


def _sentence(record: Record, everything: bool) -> str:
    match record.get("type"):
        case "incident":
            return incident_sentence(record)
        case "begin":
            return _controller(record)
        case "run":
            return _run(record)
        case "checkpoint":
            return _checkpoint(record) if everything else ""
        case _:
            return clean(record.get("sentence") or "")


def _options(record: Record) -> Iterator[str]:
    """What each option was expected to cost, where a decision was made by that."""
    data = record.get("data") or {}
    for row in data.get("options") or ():
        after = f"in {duration(row['after_s'])}" if row["after_s"] else "now"
        cost = f"{row['lost_node_s']:.1f} node-seconds lost"
        cost += f", {row['price']:.2f} in money" if row.get("price") is not None else ""
        chosen = ", chosen" if row["option"] == data.get("chosen") else ""
        yield f"  {clean(row['option'])}: {row['world_size']} workers {after}, {cost}{chosen}"


def _meshes(record: Record) -> Iterator[str]:
    """Every mesh that a generation could have had, where it could have had several."""
    for row in (record.get("data") or {}).get("meshes") or ():
        axes = ", ".join(f"{clean(axis)} {size}" for axis, size in row["axes"].items())
        if row.get("refusal"):
            parts = [clean(row["refusal"])]
        else:
            moved = [f"{100 * row['moved']:.0f} % of it over the network"] if row.get("moved") is not None else []
            parts = [plural(row["world_size"], "worker"), _mesh_step(row), *_mesh_memory(row), *moved]
        yield f"  {axes}: {', '.join([*parts, *(['chosen'] if row['chosen'] else [])])}"


def _mesh_step(row: Mapping[str, Any]) -> str:
    if row.get("seconds") is False:
        return f"step {number(row['step'])} of one worker's"
    return f"step {duration(row['step'])}{'' if row['measured'] else ' expected'}"


def _mesh_memory(row: Mapping[str, Any]) -> list[str]:
    return [f"{size(row['peak_bytes'])} of {size(row['limit_bytes'])} expected"] if "peak_bytes" in row else []


def _controller(record: Record) -> str:
    if int(record.get("incarnation", 1)) <= 1:
        return ""
    read = sum(int(count) for count in (record.get("read") or {}).values())
    return f"controller {record['incarnation']} took over after replaying {plural(read, 'record')}"


def _run(record: Record) -> str:
    reason = clean(record.get("sentence") or record.get("reason") or "")
    text = f"run {outcome(record['status'])}"
    if record.get("loss") is not None:
        text += f", loss {number(record['loss'])}"
    return f"{text}: {reason}" if reason else text


def _checkpoint(record: Record) -> str:
    details = [
        f"step {record.get('step', '?')}",
        size(record.get("bytes")),
        f"written in {duration(record.get('seconds'))}",
    ]
    stall = record.get("stall_s")
    return f"checkpoint {clean(record.get('id', '?'))} is complete: {', '.join(details)}" + (
        f", training waited {duration(stall)}" if stall is not None else ""
    )
