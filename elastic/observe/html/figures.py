"""The charts of a run's report: losses, world size and throughput, incidents, time by owner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from elastic.observe.html.chart import LEFT, RIGHT, WIDTH, Axis, Point, frame, line, rect, svg, text, vertical
from elastic.observe.text import duration, finite

Step = Mapping[str, Any]
Summary = Mapping[str, Any]

# The phases of an incident, each from the previous mark to its own, with their labels.
PHASES = {
    "detected": "until detected",
    "decided": "until decided",
    "rebuilt": "process group rebuilt",
    "restored": "state restored and verified",
    "first_step": "first step",
}


def losses(steps: Sequence[Step], summary: Summary) -> str:
    """Loss over steps. Bands are generations; repeated steps are drawn faintly in their first version."""
    known = [step for step in steps if finite(step.get("loss")) is not None]
    height, top = 300, 26
    x = Axis.over([0.0, *(float(step["step"]) for step in known)], LEFT, WIDTH - RIGHT)
    y = Axis.over([float(step["loss"]) for step in known], height - 34, top + 8, margin=0.04)
    kept, repeated = timelines(known)
    parts = [
        *_bands(summary, x, top, y.start),
        *frame(x, y, lambda value: f"{value:g}", lambda value: f"{value:,.0f}"),
        line(kept, x, y, "loss"),
        # On top: a repeated step has, except for rounding, the same loss.
        *(line(points, x, y, "abandoned") for points in repeated),
        *_incident_marks(summary, x, top, y.start),
    ]
    return svg(height, parts, "Loss at each step")


def timelines(steps: Sequence[Step]) -> tuple[list[Point], list[list[Point]]]:
    """(the final timeline, the repeated parts), each as points (step, loss) in the order of steps.

    Of a step that appears twice, the last version counts.
    """
    final: dict[int, float] = {}
    repeated: list[list[Point]] = []
    for step in steps:
        number, loss = int(step["step"]), float(step["loss"])
        if number in final:
            abandoned = sorted((old, final.pop(old)) for old in list(final) if old >= number)
            repeated.append([(float(old), value) for old, value in abandoned])
        final[number] = loss
    return [(float(number), loss) for number, loss in sorted(final.items())], repeated


def throughput(steps: Sequence[Step], summary: Summary) -> str:
    """World size and samples per second over wall clock minutes."""
    began = finite(summary.get("started_at")) or 0.0
    ended = finite(summary.get("ended_at")) or began
    scale, unit = (60.0, "min") if ended - began > 180 else (1.0, "s")
    height, top, middle = 262, 24, 122
    x = Axis(0.0, max((ended - began) / scale, 1e-9), LEFT, WIDTH - RIGHT)
    sizes = Axis.over([0.0, *(float(g["world_size"] or 0) for g in summary["generations"])], middle - 18, top, 0.0)
    rates = list(_rates(steps, began, scale))
    speed = Axis.over([0.0, *(rate for _, rate in rates)], height - 34, middle + 10, 0.0)
    parts = [
        text(LEFT, top - 10, "workers", "label"),
        *frame(x, sizes, lambda value: f"{value:g}", None),
        *_world_sizes(steps, began, scale, x, sizes),
        text(LEFT, middle + 6, "samples per second", "label"),
        *frame(x, speed, lambda value: f"{value:,.4g}", lambda value: f"{value:g} {unit}"),
        line(rates, x, speed, "rate"),
    ]
    return svg(height, parts, "World size and throughput over time")


def _rates(steps: Sequence[Step], began: float, scale: float) -> Iterator[Point]:
    """(time, samples per second) of each step; NaN between two generations."""
    for before, step in pairwise([None, *steps]):
        assert step is not None
        at = (float(step["time"]) - began) / scale
        if before is not None and before["generation"] != step["generation"]:
            yield at, math.nan
        rate = _rate(step)
        if rate is not None:
            yield at, rate


def _rate(step: Step) -> float | None:
    samples, seconds = finite(step.get("samples")), finite(step.get("duration_s"))
    return samples / seconds if samples is not None and seconds else None


def _world_sizes(steps: Sequence[Step], began: float, scale: float, x: Axis, y: Axis) -> Iterator[str]:
    """Bars of the time in which each generation finished steps; the gaps between them are recoveries."""
    spans: dict[int, list[float]] = {}
    for step in steps:
        at = (float(step["time"]) - began) / scale
        spans.setdefault(int(step["generation"]), []).append(at)
    first = {int(step["generation"]): step for step in reversed(steps)}
    for generation, times in spans.items():
        size = finite(first[generation].get("world_size"))
        if size is None:
            continue
        begin = min(times) - float(first[generation].get("duration_s") or 0.0) / scale
        title = f"generation {generation}: {size:g} workers"
        yield rect(x(begin), y(size), x(max(times)) - x(begin), y.start - y(size), "world", title)


def incidents(summary: Summary) -> str:
    """One bar per incident: how long each phase took, on one scale."""
    rows = [(incident, _phases(incident)) for incident in summary["incidents"]]
    rows = [(incident, phases) for incident, phases in rows if phases]
    if not rows:
        return ""
    longest = max(end for _, phases in rows for _, _, end in phases)
    x = Axis(0.0, longest, 250, WIDTH - 90)
    parts = []
    for number, (incident, phases) in enumerate(rows):
        y = 8 + 26 * number
        name = f"{incident['id']}  {incident['kind']}, step {incident['step']}"
        parts.append(text(240, y + 14, name, anchor="end"))
        for phase, begin, end in phases:
            title = f"{PHASES[phase]}: {duration(end - begin)}"
            parts.append(rect(x(begin), y, x(end) - x(begin), 18, f"phase {phase}", title))
        parts.append(text(x(phases[-1][2]) + 8, y + 14, duration(phases[-1][2])))
    return svg(16 + 26 * len(rows), parts, "Incidents and their phases")


def _phases(incident: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    seconds = incident.get("seconds_from_fault") or incident.get("seconds") or {}
    marks = [(name, finite(seconds.get(name))) for name in PHASES]
    reached = [(name, value) for name, value in marks if value is not None]
    ends = [("", 0.0), *reached]
    return [(name, before, max(before, end)) for (_, before), (name, end) in pairwise(ends)]


def time_ledger(ledger: Mapping[str, float]) -> str:
    """The time by owner, as one bar."""
    owners = [(owner, seconds) for owner, seconds in sorted(ledger.items(), key=lambda item: -item[1]) if seconds > 0]
    total = sum(seconds for _, seconds in owners)
    if not total:
        return ""
    x = Axis(0.0, total, 0, WIDTH)
    parts, at = [], 0.0
    for number, (owner, seconds) in enumerate(owners):
        title = f"{owner}: {duration(seconds)}, {seconds / total:.1%}"
        parts.append(rect(x(at), 0, x(at + seconds) - x(at), 28, f"owner o{number % 8}", title))
        if seconds / total > 0.09:
            parts.append(text(x(at) + 6, 19, owner, "inside"))
        at += seconds
    return svg(28, parts, "Where the time went")


def _bands(summary: Summary, x: Axis, top: float, bottom: float) -> Iterator[str]:
    for number, generation in enumerate(summary["generations"]):
        first, last = finite(generation.get("first_step")), finite(generation.get("last_step"))
        if first is None or last is None or last < first:
            continue
        begin, end = x(max(first - 1, 0)), x(last)
        size = generation.get("world_size")
        title = f"generation {generation.get('number')}: {size} workers, steps {first:g} to {last:g}"
        yield rect(begin, top, end - begin, bottom - top, f"band b{number % 2}", title)
        if end - begin > 70:
            yield text((begin + end) / 2, top - 6, f"{size} workers", anchor="middle")


def _incident_marks(summary: Summary, x: Axis, top: float, bottom: float) -> Iterator[str]:
    for incident in summary["incidents"]:
        step = finite(incident.get("step"))
        if step is None or not math.isfinite(step):
            continue
        style = "planned" if incident.get("planned") else "failure"
        yield vertical(x(step), top, bottom, style, f"{incident['kind']} after step {step:g}: {incident['evidence']}")
