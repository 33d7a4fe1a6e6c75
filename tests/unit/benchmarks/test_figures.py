"""How the figures of the benchmarks are made of what the workers have marked. Pure."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.figures import (
    MISSED,
    NOT_MEASURED,
    REACHED,
    Figure,
    Target,
    median_interval,
    not_measured,
    ratio,
    statistic,
)
from benchmarks.machine import busy_seconds
from benchmarks.marks import Mark, MarkWriter, changes, completed, read_marks, recovered
from benchmarks.table import with_ratios
from benchmarks.workload import SMALL, micro_batch

# -- marks ------------------------------------------------------------------------------------------------------------


def marks(*rows: tuple[float, int, int, int, int]) -> list[Mark]:
    return [Mark(*row) for row in rows]


TWO_THEN_ONE = marks(
    (1.0, 1, 0, 2, 7), (1.1, 1, 1, 2, 7), (2.0, 2, 0, 2, 7), (2.2, 2, 1, 2, 7),
    # Rank 0 alone has done step 3 when rank 1 is lost: nobody counts it.
    (3.0, 3, 0, 2, 7), (5.0, 2, 0, 1, 8), (6.0, 3, 0, 1, 8),
)  # fmt: skip


def test_a_step_is_done_when_the_last_rank_has_done_it() -> None:
    assert [(done.at, done.step, done.era) for done in completed(TWO_THEN_ONE)] == [
        (1.1, 1, 7), (2.2, 2, 7), (5.0, 2, 8), (6.0, 3, 8),
    ]  # fmt: skip


def test_a_recovery_ends_with_the_first_step_of_others_and_counts_what_was_repeated() -> None:
    found = recovered(TWO_THEN_ONE, fault_at=2.5)
    assert found is not None
    assert (found.seconds, found.steps_repeated, found.world_size, found.next_world_size) == (2.5, 1, 2, 1)
    # A fault in the middle of a step that the others still finish: that step is the old era's.
    assert recovered(TWO_THEN_ONE, fault_at=2.1) == recovered(TWO_THEN_ONE, fault_at=2.1)
    early = recovered(TWO_THEN_ONE, fault_at=2.1)
    assert early is not None
    assert (early.seconds, early.steps_repeated) == (pytest.approx(2.9), 1)
    assert recovered(TWO_THEN_ONE[:5], fault_at=2.5) is None


def test_a_change_of_era_lasts_from_the_last_step_to_the_next() -> None:
    (change,) = changes(TWO_THEN_ONE)
    assert (change.seconds, change.steps_repeated, change.at) == (pytest.approx(2.8), 1, 5.0)


def test_marks_survive_the_file_and_a_line_that_was_cut(tmp_path: Path) -> None:
    writer = MarkWriter(tmp_path)
    writer.step_done(4, rank=1, world_size=2, era=9)
    (file,) = tmp_path.iterdir()
    with open(file, "a", encoding="utf-8") as lines:
        lines.write("[1.0, 5, 1")
    (mark,) = read_marks(tmp_path)
    assert (mark.step, mark.rank, mark.world_size, mark.era) == (4, 1, 2, 9)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_a_figure_is_held_against_its_targets_and_survives_the_file() -> None:
    targets = (Target("median", 1.5), Target("p95", 3.0))
    figure = Figure("case", "name", "s", (1.0, 1.2, 1.4, 3.5), targets=targets, details={"a": 1})
    assert figure.verdict == MISSED
    assert Figure.from_json(json.loads(json.dumps(figure.to_json()))) == figure
    assert Figure("case", "name", "s", (1.0, 1.2, 2.9), targets=targets).verdict == REACHED
    missing = not_measured("case", "name", "s", "it did not start", targets=targets)
    assert (missing.verdict, missing.to_json()["summary"]) == (NOT_MEASURED, {"n": 0})
    assert asdict(missing)["failure"] == "it did not start"


def test_statistics() -> None:
    values = [float(value) for value in range(1, 21)]
    assert [statistic(values, name) for name in ("median", "mean", "min", "max", "p95")] == [10.5, 10.5, 1, 20, 19]
    with pytest.raises(ValueError, match="no values"):
        statistic([], "median")
    with pytest.raises(ValueError, match="no statistic"):
        statistic(values, "mode")


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    values = [float(value) for value in range(10, 0, -1)]
    # Fewer than two of ten fair coins: 11 / 1024 on either side, 97.9 % between; fewer than three: only 89.1 %.
    assert median_interval(values) == (2.0, 9.0)
    assert median_interval(values, 0.89) == (3.0, 8.0)
    assert median_interval(values[:6]) == (5.0, 10.0)
    assert median_interval(values[:5]) is None
    assert median_interval([]) is None


def test_a_ratio_is_of_the_medians_and_says_what_is_missing() -> None:
    peer = Figure("ray-train", "loss", "s", (90.0, 60.0, 80.0), "Ray Train v2 elastic")
    own = Figure("recovery", "node SIGKILL -> next step, 4 -> 3, ZeRO-1, from memory", "s", (1.0, 2.0, 4.0))
    found = with_ratios([peer, own])[-1]
    assert (found.values, found.verdict) == ((40.0,), REACHED)
    failed = not_measured("recovery", own.name, "s", "no")
    assert with_ratios([peer, failed])[-1].failure == "not measured: ray-elastic"
    assert ratio("case", "name", own, peer).values == (0.025,)


def test_the_peers_deal_the_same_batch_at_every_world_size() -> None:
    assert {size: micro_batch(SMALL, size) * size for size in (2, 3, 4)} == {2: 12, 3: 24, 4: 24}
    with pytest.raises(ValueError, match="cannot be dealt"):
        micro_batch(SMALL, 5)


def test_processor_time_of_the_machine_grows_by_what_this_process_uses() -> None:
    before, mine = busy_seconds(), time.process_time()
    while time.process_time() - mine < 0.1:
        sum(range(10_000))
    assert busy_seconds() - before > 0.05
