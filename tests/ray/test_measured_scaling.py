"""The measured scaling policy on real raylets: real recoveries give the facts by which the second loss is decided."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run

from elastic.core.policy.measured import Measured
from elastic.core.settings import ScalingSettings
from elastic.core.typed_json import encode
from elastic.observe import records
from elastic.observe.journal import JournalWriter
from elastic.observe.story import story
from elastic.runtime.controller.replay import replay

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_second_loss_is_decided_by_what_the_first_one_has_cost(cluster: LocalCluster, tmp_path: Path) -> None:
    scaling = ScalingSettings(2, 3, policy="measured", price_per_node_hour=36.0)
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=scaling, epochs=3)
    run.allow(7)
    run.start()
    run.reach(7)
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 2, "without facts it continues at once"
    run.grow_to(3)
    cluster.add_node()
    (known,) = run.records("facts")[-1:]
    for name in ("recovery_s", "resize_s", "replacement_s", "step_s"):
        assert known["measured"][name], f"{name} was measured"
    assert known["measured"]["losses"] == 1
    lost_in = run.handle.progress()["generation"]
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(lost_in + 1)
    run.finish()

    run.assert_whole()
    compared = [r["data"] for r in run.records("decision") if r["data"].get("options")]
    after_loss = [data for data in compared if data["chosen"] in ("shrink", "wait")]
    assert after_loss, run.told()
    costs = {row["option"]: row["lost_node_s"] for row in after_loss[0]["options"]}
    assert after_loss[0]["chosen"] == min(costs, key=costs.__getitem__)
    assert costs.keys() == {"shrink", "wait"}
    told = [line.sentence for line in story(run.records()) if "node-seconds lost" in line.sentence]
    assert sum(", chosen" in sentence for sentence in told) == len(compared)
    again = replay(JournalWriter(run.url, "run").replayed, run.settings)
    assert encode(again.state.meter.measured) == run.records("facts")[-1]["measured"]


def test_a_run_waits_for_a_replacement_where_an_earlier_attempt_has_found_resizes_dear(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    scaling = ScalingSettings(2, 3, policy="measured")
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=scaling)
    # What that attempt left: a wait of a minute costs less than a resize of ten, and the time with two of three.
    earlier = Measured(recovery_s=(600.0,), resize_s=(600.0,), replacement_s=(60.0,), step_s={3: 1.0, 2: 1.5})
    JournalWriter(run.url, "run").append(records.facts(earlier))
    run.allow(4)
    run.start()
    run.reach(4)
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 3
    run.finish()

    run.assert_whole()
    (incident,) = run.incidents()
    assert (incident["world_size"], incident["next_world_size"], incident["source"]) == (3, 3, "memory")
    assert incident["action"] == "wait for a replacement"
    (chosen,) = {r["data"]["chosen"] for r in run.records("decision") if r["data"].get("options")}
    assert chosen == "wait"
    known = run.records("facts")[-1]["measured"]
    assert (len(known["replacement_s"]), known["losses"]) == (2, 1)
    assert known["recovery_s"][-1] < 60.0, "the wait is not part of the recovery"
