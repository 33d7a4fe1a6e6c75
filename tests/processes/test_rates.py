"""A learning rate that the loop sets from a counter of its own, in real generations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Outcome
from test_oracle import BATCH, LAST_STEP

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

COUNTS = "counting.counts_by_itself"


@pytest.mark.parametrize("by", ["counter", "context"])
def test_a_counter_that_begins_anew_is_named_before_it_does_harm(crew: Crew, tmp_path: Path, by: str) -> None:
    """Seen: a resumed run went through its warm-up again, without a word."""
    config, more = {"url": str(tmp_path), "by": by}, {"batch": BATCH, "max_world_size": 3}
    first = crew.run([0, 1], COUNTS, config, end_at=6, **more)
    assert [outcome.result.kind for outcome in first] == ["ended"] * 2
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    # All ranks begin anew, as they do when a run is resumed: they agree with each other.
    again = crew.run([0, 1], COUNTS, config, checkpoint=newest.id, **more)
    for outcome in again:
        assert (outcome.result.kind, outcome.result.step) == ("finished", LAST_STEP), outcome.result.traceback
        named = [said for said in outcome.told["warnings"] if "count by elastic.get_context().step" in said]
        assert len(named) == (by == "counter")
        if named:
            assert named[0].startswith("step 7 has learning rate 0.002, as the run's first step, and the restored")
    rates = [report.learning_rates[0] for report in again[0].reports]
    assert rates[0] == pytest.approx(0.002 if by == "counter" else 0.01)


def test_a_worker_that_joins_with_another_rate_is_refused(crew: Crew, tmp_path: Path) -> None:
    """Seen: all processes were replaced by such that began their warm-up anew, and so again with every worker that
    joined: a hundred generations, and never an end."""
    config = {"url": str(tmp_path), "by": "counter", "in_loop": True}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1}
    crew.run([0, 1], COUNTS, config, end_at=6, **more)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    for outcome in crew.run([0, 1, 2], COUNTS, config, checkpoint=newest.id, **more):
        assert (outcome.result.kind, outcome.result.step) == ("collective_failed", 6), outcome.result
        assert "or than other ranks have" in outcome.result.message
    for outcome in crew.run([0, 1, 2], COUNTS, config, checkpoint=newest.id, **more):
        assert (outcome.result.kind, outcome.result.step) == ("usage_error", 6), outcome.result
        assert "as the run's first step" in outcome.result.message
        assert "or begin the counter with it" in outcome.result.message


def test_rates_that_come_apart_later_are_not_saved(crew: Crew, tmp_path: Path) -> None:
    config = {"url": str(tmp_path), "by": "counter", "in_loop": True, "drop": 7}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1}
    crew.run([0, 1], COUNTS, config, end_at=6, **more)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    for outcome in crew.run([0, 1, 2], COUNTS, config, checkpoint=newest.id, **more):
        assert (outcome.result.kind, outcome.result.step) == ("collective_failed", 8), outcome.result
        assert "hyper-parameters of group 0 on rank 2 differs" in outcome.result.traceback
        assert "count by elastic.get_context().step" in outcome.result.traceback
    _assert_left(crew, "it sets learning rates from a counter of its own")
    assert CheckpointStore(str(tmp_path), "run").list()[0].step == 7


@pytest.mark.parametrize("by", ["counter", "begun"])
def test_a_counter_that_is_ahead_begins_anew_on_all_ranks(crew: Crew, tmp_path: Path, by: str) -> None:
    """Step 3 is repeated by two functions in their loops, beside one that has just begun. Seen: with the rate of step
    4, and a line in the worker's output."""
    config = {"url": str(tmp_path), "by": by, "in_loop": True}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1}
    _assert_kinds(crew.run([0, 1], COUNTS, config, end_at=3, **more), "ended")
    second = {entry.step: entry.id for entry in CheckpointStore(str(tmp_path), "run").list()}[2]
    _assert_kinds(crew.run([0, 1, 2], COUNTS, config, checkpoint=second, **more), "collective_failed")
    _assert_left(crew, "it sets learning rates from a counter of its own")
    again = crew.run([0, 1, 2], COUNTS, config, checkpoint=second, **more)
    _assert_kinds(again, "usage_error" if by == "counter" else "finished")
    rates = [report.learning_rates[0] for report in again[0].reports]
    assert rates == pytest.approx([0.01 * min(1.0, step / 5) for step in range(3, LAST_STEP + 1)] * (by == "begun"))


def test_a_schedule_of_the_engine_stays_in_its_loop(crew: Crew, tmp_path: Path) -> None:
    """Step 3 is repeated, with the rate of the first time."""
    config = {"url": str(tmp_path), "stage": 1, "in_loop": True}
    more: dict[str, Any] = {"batch": BATCH, "checkpoint_every_steps": 1}
    _assert_kinds(crew.run([0, 1], "train", config, end_at=3, **more), "ended")
    second = {entry.step: entry.id for entry in CheckpointStore(str(tmp_path), "run").list()}[2]
    _assert_kinds(crew.run([0, 1], "train", config, checkpoint=second, **more), "finished")
    assert [point for member in crew.members[:2] for point in member.points if point.startswith("left")] == []


def test_a_loop_that_counts_the_batches_of_a_step_begins_anew_with_another_count(crew: Crew, tmp_path: Path) -> None:
    """One rank has five batches in a step, three have two. Seen: the loop of the one went on with the five batches that
    it had asked for, and made the next step with the rate of this one; and at the run's end, whose last step was saved,
    `next` ended it as "cannot continue as it is written"."""
    config = {"url": str(tmp_path), "in_loop": True}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3}
    _assert_kinds(crew.run([0], "counting.counts_batches", config, end_at=2, **more), "ended")
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    grown = crew.run([0, 1, 2], "counting.counts_batches", config, checkpoint=newest.id, **more)
    _assert_kinds(grown, "finished")
    for outcome in grown:
        rates = [report.learning_rates[0] for report in outcome.reports]
        assert rates == pytest.approx([0.01 * min(1.0, step / 5) for step in range(3, LAST_STEP + 1)])


def _assert_left(crew: Crew, why: str) -> None:
    for member in crew.members[:3]:
        assert [why in point for point in member.points if point.startswith("left")] == [True]


def _assert_kinds(outcomes: list[Outcome], kind: str) -> None:
    assert [outcome.result.kind for outcome in outcomes] == [kind] * len(outcomes), outcomes[0].result
