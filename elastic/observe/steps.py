"""The steps of a run's final timeline as rows, for tables, charts and exporters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic.observe.records import Record, begins_generation, steps_of

_COLUMNS = ("step", "time", "generation", "loss", "grad_norm", "duration_s", "samples")


def step_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per step, in order; of a repeated step only the last version.

    Columns: step, time (wall clock seconds), generation, loss, grad_norm, duration_s, samples, and each of the user's
    metrics by its name (by `metrics.NAME` where a column has that name).
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if begins_generation(record):
            first = int(record["first_step"])
            rows = {step: row for step, row in rows.items() if step < first}
        for step in steps_of([record]):
            rows[int(step["step"])] = _row(step)
    return [rows[step] for step in sorted(rows)]


def _row(step: Record) -> dict[str, Any]:
    metrics = {
        f"metrics.{name}" if name in _COLUMNS else name: value for name, value in (step.get("metrics") or {}).items()
    }
    return {**{name: step.get(name) for name in _COLUMNS}, **metrics}
