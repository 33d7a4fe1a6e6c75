"""Rows of the final timeline: steps that were rolled back are gone, metrics are columns."""

from __future__ import annotations

from typing import Any

from elastic.observe.steps import step_rows


def steps(*numbers: int, generation: int = 1, **metrics: Any) -> dict[str, Any]:
    return {
        "type": "steps",
        "steps": [{"step": n, "generation": generation, "loss": n / 2, "metrics": metrics} for n in numbers],
    }


def test_only_the_final_timeline_counts() -> None:
    began = {"type": "generation", "number": 2, "first_step": 3}
    rows = step_rows([steps(1, 2, 3, 4), began, steps(3, generation=2), {"type": "run"}])
    assert [(row["step"], row["generation"]) for row in rows] == [(1, 1), (2, 1), (3, 2)]


def test_a_metric_never_hides_a_column_of_the_run() -> None:
    (row,) = step_rows([steps(1, step=99, val_loss=0.5)])
    assert (row["step"], row["metrics.step"], row["val_loss"]) == (1, 99, 0.5)
