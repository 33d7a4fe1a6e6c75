"""A straggler is reported. That it is evicted where the policy says so: tests/faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run

pytestmark = pytest.mark.ray

# Wide enough for a machine whose cores all ranks share: the slow one takes four times as long.
QUICK = {"window_steps": 3, "windows": 2, "calibration_windows": 1, "factor": 2.0}


@pytest.mark.slow
def test_the_default_is_to_say_so(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, "busy:train", epochs=2, stragglers={"policy": "report", **QUICK})
    run.allow(5)
    run.start()
    run.reach(5)
    slow = run.worker(2)
    (tmp_path / "slow").write_text("2")
    run.allow(17)
    run.wait_for("the straggler to be named", lambda _: run.decisions("straggler"))
    run.reach(17)
    (shown,) = run.handle.progress()["stragglers"]
    assert (shown["worker"], shown["rank"], shown["node"]) == (slow["worker"], 2, slow["node"])
    (tmp_path / "slow").unlink()
    run.finish()
    run.assert_whole()
    assert [generation["number"] for generation in run.summary()["generations"]] == [1]
