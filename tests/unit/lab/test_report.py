"""What the lab prints of a step, of its bytes and of its memory; and that what differs from a formula is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from lab import report
from lab_samples import GATHERS, LINK, SCATTERS, STEP, TENSORS

from elastic.core.data.collectives import CollectiveUse


def test_the_collectives_of_a_step_in_their_order() -> None:
    head, names, *rows = report.synchronisation(STEP, elements=42)
    assert head == "step 7 on 3 ranks, as rank 0 saw it: 320.0 ms, 1 micro-batches"
    assert names.split("  ")[0] == "micro-batch"
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    assert cells == [
        # Gathers of one pass together: 40 ms in flight, for 10 of which the thread waited.
        ["1", "forward (100.0 ms)", "10.0 ms", GATHERS, "2", "84 B", "-", "40.0 ms", "10.0 ms", "75%"],
        ["1", "backward (200.0 ms)", "50.0 ms", SCATTERS, "1", "100 B", "60%", "10.0 ms", "10.0 ms", "0%"],
        ["1", "backward (200.0 ms)", "150.0 ms", SCATTERS, "1", "68 B", "100%", "20.0 ms", "5.00 ms", "75%"],
        ["1", "step (20.0 ms)", "10.0 ms", "all_reduce", "1", "8 B", "-", "1.00 ms", "1.00 ms", "0%"],
    ]


def uses(gathered: int = 168, scattered: int = 168) -> list[list[Any]]:
    rows = [(GATHERS, 20, gathered), (SCATTERS, 8, scattered), ("all_reduce", 1, 8)]
    return [CollectiveUse(op, "dp", "float32", calls, count, 0.1, 0.05).to_json() for op, calls, count in rows]


def journal(*steps: list[list[Any]]) -> list[dict[str, Any]]:
    found = [
        {"step": number, "generation": 1, "duration_s": 1.0, "collectives": rows} for number, rows in enumerate(steps)
    ]
    return [{"type": "generation", "number": 1, "world_size": 3, "first_step": 1}, {"type": "steps", "steps": found}]


def test_bytes_that_equal_the_formulas() -> None:
    lines, wrong = report.wire(journal(uses(gathered=252), uses(), uses()), TENSORS, 3, (12, 2), LINK)
    assert wrong == []
    assert lines[-1] == "bytes equal the formulas in 3 of 3 steps with a ledger in the journal"
    (row,) = (line.split() for line in lines if line.startswith(GATHERS))
    # 20 gathers of two messages each, and two thirds of the payload: 40 ms and 112 ns.
    assert row == [GATHERS, "20", "168", "168", "112", "B", "40.0", "ms", "100.0", "ms", "50.0", "ms"]


@pytest.mark.parametrize("bad", [uses(gathered=252), uses(scattered=164), uses()[:1]])
def test_bytes_that_do_not_are_named(bad: list[list[Any]]) -> None:
    lines, wrong = report.wire(journal(uses(gathered=252), bad), TENSORS, 3, (12, 2), LINK)
    assert len(wrong) == 1
    assert wrong[0].startswith("step 1 has moved")
    assert lines[-1].startswith("bytes equal the formulas in 1 of 2 steps")


def test_a_journal_without_collectives_proves_nothing() -> None:
    assert report.wire(journal([], []), TENSORS, 3, (12, 2), LINK)[1] == ["the journal has no collectives"]


def test_memory_of_each_rank() -> None:
    lines, wrong = report.held([STEP, {**STEP, "rank": 1}], TENSORS, 3)
    assert wrong == []
    # A rank's share of 84 bytes of weights, their copy and gradients, and of two moments.
    assert lines[-1].split() == ["3", "all", "140", "140", "2", "8.24"]
    other = copy.deepcopy(STEP)
    other["memory"]["moments"] = 60
    lines, wrong = report.held([STEP, other], TENSORS, 3)
    assert len(wrong) == 1
    assert "rank 0 of 3 holds" in wrong[0]
    assert lines[-1].split() == ["3", "all", "140", "140", "to", "144", "2", "8.24"]


def test_alpha_and_beta_are_those_of_the_best_times() -> None:
    pair = {size: [0.5, 0.001 + size * 1e-9, 0.3] for size in (1000, 100_000, 10_000_000)}
    link = report.fitted(pair)
    assert link.alpha_s == pytest.approx(0.001, rel=0.01)
    assert link.beta_s_per_byte == pytest.approx(1e-9, rel=0.01)
    measured = {name: pair for name in ("pair", "ring", "tree", "hierarchical", "gloo")}
    head, _, first, *_ = report.all_reduce(measured, link, 4, 2)
    assert "alpha 1.00 ms, beta 1.00 ns per byte (1000 MB/s)" in head
    # Six messages; the best of three is a single message's time here.
    assert first.split()[-1] == "0.17"
