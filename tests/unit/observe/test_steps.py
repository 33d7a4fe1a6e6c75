"""Rows of the final timeline, without steps that were rolled back; and a generation's collectives as medians."""

from __future__ import annotations

from typing import Any

from elastic.core.data.collectives import CollectiveUse
from elastic.observe.steps import collective_table, step_rows


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


def counted(number: int, generation: int, *sizes: int, seconds: float = 0.1) -> dict[str, Any]:
    rows = [CollectiveUse(f"op{i}", "dp", "float32", 2, size, seconds, seconds / 2) for i, size in enumerate(sizes)]
    return {"step": number, "generation": generation, "duration_s": 1.0, "collectives": [row.to_json() for row in rows]}


def begins(number: int, world_size: int) -> dict[str, Any]:
    return {"type": "generation", "number": number, "world_size": world_size, "first_step": 1}


RECORDS = [
    begins(1, 4),
    {"type": "steps", "steps": [counted(1, 1, 900), counted(2, 1, 100)]},
    begins(2, 3),
    {"type": "steps", "steps": [counted(3, 2, 999, 1), counted(4, 2, 10, 50, seconds=0.3)]},
    {"type": "steps", "steps": [counted(5, 2, 30, 50), counted(6, 2, 20)]},
]


def test_the_newest_generation_without_its_first_step() -> None:
    table = collective_table(RECORDS)
    assert table is not None
    assert (table.generation, table.world_size, table.first_step, table.last_step, table.step_s) == (2, 3, 4, 6, 1.0)
    # The largest payload first; each row's medians are those of the steps that have it.
    rows = [(use.op, use.calls, use.bytes, use.seconds) for use in table.rows]
    assert rows == [("op1", 2, 50, 0.2), ("op0", 2, 20, 0.1)]


def test_a_generation_by_its_number() -> None:
    table = collective_table(RECORDS, 1)
    assert table is not None
    assert (table.world_size, table.first_step, table.rows[0].bytes) == (4, 2, 100)
    assert collective_table(RECORDS, 7) is None


def test_a_journal_without_collectives() -> None:
    bare = {"step": 1, "generation": 1, "duration_s": 1.0}
    assert collective_table([begins(1, 4), {"type": "steps", "steps": [bare]}]) is None
