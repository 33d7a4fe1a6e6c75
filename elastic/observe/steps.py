"""A run's steps as rows, for tables, charts and exporters: the final timeline, and what collectives cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from elastic.core.data.collectives import CollectiveUse
from elastic.observe.records import Record, begins_generation, steps_of

_COLUMNS = ("step", "time", "generation", "loss", "grad_norm", "duration_s", "samples")


def step_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per step, in order; of a repeated step only the last version.

    Columns: step, time (wall clock seconds), generation, loss, grad_norm, duration_s, samples, and each of the user's
    metrics by its name (by `metrics.NAME` where a column has that name).
    """
    return [_row(step) for step in final_steps(records)]


def final_steps(records: Iterable[Record]) -> list[Record]:
    """The records of the steps that count, in order: without those that were rolled back, and of a repeated step its
    last version."""
    kept: dict[int, Record] = {}
    for record in records:
        if begins_generation(record):
            first = int(record["first_step"])
            kept = {step: row for step, row in kept.items() if step < first}
        for step in steps_of([record]):
            kept[int(step["step"])] = step
    return [kept[step] for step in sorted(kept)]


def _row(step: Record) -> dict[str, Any]:
    metrics = {
        f"metrics.{name}" if name in _COLUMNS else name: value for name, value in (step.get("metrics") or {}).items()
    }
    return {**{name: step.get(name) for name in _COLUMNS}, **metrics}


@dataclass(frozen=True)
class CollectiveTable:
    """Rank 0's collectives in one generation. Each row has the medians over the steps in which it occurs: calls and
    bytes are rounded down to whole ones. `step_s` is the median step's duration. `travel`: (step, how gradients travel
    from it on, and what other strategies would have cost). `shares` has, by "operation axis dtype", the share of the
    steps that have a row, where not all have."""

    generation: int
    world_size: int
    first_step: int
    last_step: int
    step_s: float
    rows: tuple[CollectiveUse, ...]
    travel: tuple[tuple[int, str], ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)

    def share(self, use: CollectiveUse) -> float:
        """Of the steps: those that have the row."""
        return self.shares.get(_key(use), 1.0)


def collective_table(records: Iterable[Record], generation: int | None = None) -> CollectiveTable | None:
    """Of this generation, or of the newest that has any. None where the journal has none.

    A generation's first step is left out where there are others: it contains what is done once.
    """
    sizes: dict[int, int] = {}
    steps: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if begins_generation(record):
            sizes[int(record["number"])] = int(record["world_size"])
        for step in steps_of([record]):
            if "collectives" in step:
                steps[int(step["generation"])].append(step)
    known = [number for number, found in steps.items() if any(step["collectives"] for step in found)]
    chosen = max(known, default=None) if generation is None else generation
    if chosen is None or chosen not in known or chosen not in sizes:
        return None
    counted = steps[chosen][1:]
    if not any(step["collectives"] for step in counted):
        counted = steps[chosen]
    return CollectiveTable(
        generation=chosen,
        world_size=sizes[chosen],
        first_step=min(int(step["step"]) for step in counted),
        last_step=max(int(step["step"]) for step in counted),
        step_s=median(float(step["duration_s"]) for step in counted),
        rows=_medians(counted),
        shares=_shares(counted),
        travel=tuple((int(step["step"]), str(step["travel"])) for step in steps[chosen] if step.get("travel")),
    )


def _shares(steps: Sequence[Record]) -> dict[str, float]:
    """Of the steps, by operation, axis and dtype: those that have it, where not all have."""
    rows = (CollectiveUse.from_json(row) for step in steps for row in step["collectives"])
    counts = Counter(_key(row) for row in rows)
    return {key: count / len(steps) for key, count in counts.items() if count < len(steps)}


def _key(use: CollectiveUse) -> str:
    return f"{use.op} {use.axis} {use.dtype}"


def _medians(steps: Sequence[Record]) -> tuple[CollectiveUse, ...]:
    seen: dict[tuple[str, str, str], list[CollectiveUse]] = defaultdict(list)
    for step in steps:
        for row in step["collectives"]:
            use = CollectiveUse.from_json(row)
            seen[use.op, use.axis, use.dtype].append(use)

    rows = [
        CollectiveUse(
            *key,
            calls=int(median(use.calls for use in uses)),
            bytes=int(median(use.bytes for use in uses)),
            seconds=median(use.seconds for use in uses),
            waited_s=median(use.waited_s for use in uses),
        )
        for key, uses in seen.items()
    ]
    return tuple(sorted(rows, key=lambda use: (-use.bytes, use.op, use.axis)))
