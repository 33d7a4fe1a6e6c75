"""Nodes measured as they join, on real raylets: the first ones with each other, later ones with none that trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run

from elastic.core.settings import CalibrationSettings, ScalingSettings
from elastic.observe.story import story

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_every_node_is_measured_and_none_that_trains(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=ScalingSettings(2, 3))
    run.settings = replace(run.settings, calibration=CalibrationSettings("report"))
    run.allow(6)
    run.start()
    run.reach(6)
    first = run.events("NodeMeasured")
    assert len(first) == 3
    assert [not event["failed"] for event in first] == [True] * 3
    assert sum(bool(event["partner"]) for event in first) == 2, "all but the first to join had an idle node"
    assert {event["link"] for event in first if event["partner"]} == {"same host"}
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(2)
    run.grow_to(3)
    last = run.events("NodeMeasured")[-1]
    assert (last["partner"], last["sent"], [name for name, _ in last["rates"]]) == ("", [], ["gemm", "memory", "disk"])
    run.finish()

    run.assert_whole()
    told = [line.sentence for line in story(run.records()) if line.sentence.startswith("node ")]
    assert len([sentence for sentence in told if "GFLOP/s" in sentence]) == 4
    verdicts = run.summary()["calibration"]
    assert len(verdicts) == 4
    assert {verdict["state"] for verdict in verdicts.values()} <= {"healthy", "slow", "refused"}
