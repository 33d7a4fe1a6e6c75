"""Evaluation, work of one rank alone, and an export after the last step take longer than a hang, and are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run

from elastic.core.settings import ScalingSettings

pytestmark = pytest.mark.ray


def test_what_takes_long_without_a_step_is_no_hang(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(
        cluster, tmp_path, "loops:evaluates_and_exports", scaling=ScalingSettings(2, 2), config={"slow_s": 7.0},
        epochs=1, failures={"hang_floor_s": 4.0},
    ).start()  # fmt: skip
    run.finish()
    run.assert_whole()
    assert run.incidents() == []
