"""A learning rate that the loop sets from a counter of its own, in real generations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from test_oracle import BATCH, LAST_STEP

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("by", ["counter", "context"])
def test_a_counter_that_begins_anew_is_named_before_it_does_harm(crew: Crew, tmp_path: Path, by: str) -> None:
    """Seen: a resumed run went through its warm-up again, without a word."""
    config, more = {"url": str(tmp_path), "by": by}, {"batch": BATCH, "max_world_size": 3}
    first = crew.run([0, 1], "counts_by_itself", config, end_at=6, **more)
    assert [outcome.result.kind for outcome in first] == ["ended"] * 2
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    # All ranks begin anew, as they do when a run is resumed: they agree with each other.
    again = crew.run([0, 1], "counts_by_itself", config, checkpoint=newest.id, **more)
    for outcome in again:
        assert (outcome.result.kind, outcome.result.step) == ("finished", LAST_STEP), outcome.result.traceback
        named = [said for said in outcome.told["warnings"] if "count by elastic.get_context().step" in said]
        assert len(named) == (by == "counter")
        if named:
            assert named[0].startswith("step 7 has learning rate 0.002, as the run's first step, and the restored")
    rates = [report.learning_rates[0] for report in again[0].reports]
    assert rates[0] == pytest.approx(0.002 if by == "counter" else 0.01)


def test_a_worker_that_joins_with_another_rate_ends_the_generation_with_what_to_write(
    crew: Crew, tmp_path: Path
) -> None:
    config = {"url": str(tmp_path), "by": "counter", "in_loop": True}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1}
    crew.run([0, 1], "counts_by_itself", config, end_at=6, **more)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    for outcome in crew.run([0, 1, 2], "counts_by_itself", config, checkpoint=newest.id, **more):
        assert outcome.result.step == 7, "nothing was saved of the step that they differ in"
        assert "hyper-parameters of group 0 on rank 2 differs" in outcome.result.traceback
        assert "count by elastic.get_context().step" in outcome.result.traceback
    assert CheckpointStore(str(tmp_path), "run").list()[0].step == 6
