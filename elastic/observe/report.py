"""A summary as a short text for people: what happened, when, and how long each recovery took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.wording import plural
from elastic.observe.text import (
    clean,
    duration,
    mesh_words,
    number,
    origin,
    outcome,
    size,
    step_range,
    table,
    world_change,
)

Summary = Mapping[str, Any]

_MARKS = ("detected", "decided", "rebuilt", "restored", "first_step")


def report(summary: Summary) -> list[str]:
    """Lines without control characters. Empty sections are omitted."""
    sections = [
        [_headline(summary)],
        _incidents(summary),
        _generations(summary),
        _checkpoints(summary),
        _slow_nodes(summary),
        _ledger(summary),
        _compute(summary),
        _noise(summary),
    ]
    lines: list[str] = []
    for section in sections:
        if section:
            lines += [*([""] if lines else []), *section]
    return lines


def _headline(summary: Summary) -> str:
    parts = [f"run {summary.get('run_id') or '?'} {outcome(summary.get('status'))}"]
    if summary.get("steps") is not None:
        parts.append(plural(summary["steps"], "step"))
    if summary.get("final_loss") is not None:
        parts.append(f"loss {number(summary['final_loss'])}")
    if summary.get("wall_s") is not None:
        parts.append(duration(summary["wall_s"]))
    samples = summary.get("samples") or {}
    if samples.get("seen") is not None:
        missing, repeated = samples.get("missing") or 0, samples.get("repeated") or 0
        parts.append(f"{samples['seen']} samples seen, {missing} missing, {repeated} repeated")
        if samples.get("skipped"):
            parts.append(f"{samples['skipped']} skipped")
    return ", ".join(parts)


def _incidents(summary: Summary) -> list[str]:
    began = summary.get("started_at")
    return table([_incident(incident, began) for incident in summary.get("incidents") or ()])


def _incident(incident: Mapping[str, Any], began: float | None) -> dict[str, str]:
    # Times count from the fault itself if it is known.
    seconds = incident.get("seconds_from_fault") or incident.get("seconds") or {}
    at = incident.get("at")
    return {
        "incident": clean(incident.get("kind", "")),
        "lost": clean(incident.get("lost") or "-"),
        "at": duration(at - began) if at is not None and began is not None else "-",
        "step": "-" if incident.get("step") is None else str(incident["step"]),
        "world": world_change(incident.get("world_size"), incident.get("next_world_size")),
        **{name.replace("_", " "): duration(seconds.get(name)) for name in _MARKS},
        "repeated": "-" if incident.get("steps_repeated") is None else plural(incident["steps_repeated"], "step"),
        "from": origin(incident.get("source"), incident.get("bytes_from")),
    }


def _slow_nodes(summary: Summary) -> list[str]:
    """Those that were not as fast as the others when they joined."""
    known = summary.get("calibration") or {}
    return [
        f"node {clean(node)[:8]} is {clean(verdict.get('state'))}: {clean('; '.join(verdict.get('reasons') or ()))}"
        for node, verdict in known.items()
        if verdict.get("state") != "healthy"
    ]


def _generations(summary: Summary) -> list[str]:
    meshes = any(generation.get("mesh") for generation in summary.get("generations") or ())
    return table(
        [
            {
                "generation": str(generation.get("number")),
                "workers": str(generation.get("world_size")),
                **({"mesh": mesh_words(generation.get("mesh")) or "-"} if meshes else {}),
                "steps": step_range(generation.get("first_step"), generation.get("last_step")),
            }
            for generation in summary.get("generations") or ()
        ]
    )


def _checkpoints(summary: Summary) -> list[str]:
    checkpoints = summary.get("checkpoints") or []
    if not checkpoints:
        return []
    last, stall = checkpoints[-1], summary.get("save_stall_s") or {}
    text = (
        f"{plural(len(checkpoints), 'checkpoint')}, the last after step {last.get('step')} ({size(last.get('bytes'))})"
    )
    if stall.get("median") is not None:
        text += f"; training waited {duration(stall['median'])} per save (median), {duration(stall['max'])} at most"
    return [text]


def _ledger(summary: Summary) -> list[str]:
    ledger = summary.get("time_ledger") or {}
    total = sum(ledger.values())
    owners = sorted(ledger.items(), key=lambda item: -item[1])
    shares = [f"{owner} {duration(seconds)} ({seconds / total:.0%})" for owner, seconds in owners if seconds > 0]
    return [f"time: {', '.join(shares)}"] if shares else []


def _noise(summary: Summary) -> list[str]:
    noise = summary.get("gradient_noise")
    return [f"gradient noise: {noise['advice']}"] if noise else []


def _compute(summary: Summary) -> list[str]:
    compute = summary.get("compute")
    return [f"compute: {sentence}" for sentence in compute["sentences"]] if compute else []
