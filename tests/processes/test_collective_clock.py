"""A rank's own time in a step: the slow one shows, although all steps take equally long."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from crew import Crew

from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

BUSY_S = 0.05


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_slow_rank_works_and_the_others_wait(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "url": str(tmp_path), "slow": 1, "busy_s": BUSY_S}
    outcomes = crew.run([0, 1, 2], "train_with_a_slow_rank", config, batch=BatchSettings(max_steps=8))
    assert {outcome.result.kind for outcome in outcomes} == {"finished"}, outcomes[0].result.traceback
    # Two micro-batches per rank and step: what the loop does for certain, however busy the machine is.
    assert all(report.noncollective_s >= 2 * BUSY_S for report in outcomes[1].reports)
    assert all(0.0 < report.noncollective_s < report.duration_s for outcome in outcomes for report in outcome.reports)
    own = [median(report.noncollective_s for report in outcome.reports) for outcome in outcomes]
    assert max(own[0], own[2]) < own[1], own


def test_the_backend_is_left_as_it_was(crew: Crew, tmp_path: Path) -> None:
    """A proxy that stayed would be wrapped anew with every generation."""
    config = {"stage": 2, "url": str(tmp_path)}
    for _ in range(2):
        for outcome in crew.run([0, 1], "train_and_tell_the_backend", config, batch=BatchSettings(max_steps=2)):
            assert outcome.result.kind == "finished", outcome.result.traceback
            assert (outcome.told["before"], outcome.told["inside"]) == ("TorchBackend", ["_Timed", "TorchBackend"])
