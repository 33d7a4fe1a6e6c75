"""A straggler is reported, or evicted where the policy says so: the other workers continue without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run

pytestmark = pytest.mark.ray

# Wide enough for a machine whose cores all ranks share: the slow one takes four times as long.
QUICK = {"window_steps": 3, "windows": 2, "calibration_windows": 1, "factor": 2.0}


@pytest.mark.slow
def test_a_slow_rank_is_left_out_without_a_lost_step(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(
        cluster, tmp_path, "busy:train", epochs=3, memory={"every_steps": 1}, every_steps=None,
        stragglers={"policy": "evict", **QUICK},
    )  # fmt: skip
    run.allow(5)
    run.start()
    # The window in which it is measured what is usual is over.
    run.reach(5)
    rank = run.away_from_head()[0]
    slow = run.worker(rank)
    (tmp_path / "slow").write_text(str(rank))
    run.allow(1 << 30)
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 3
    run.finish()

    run.assert_whole()
    found = [record for record in run.records("decision") if record["kind"] == "straggler"]
    assert {(record["data"]["worker"], record["data"]["node"]) for record in found} == {(slow["worker"], slow["node"])}
    assert all(record["data"]["factor"] > 2.0 for record in found)
    assert f"rank {rank} on node {slow['node'][:8]} needs" in found[0]["sentence"]
    confirmed = [event["confirmed"] for event in run.events("StragglerFound")]
    assert confirmed == [False, True]
    evicted = run.incidents()[0]
    assert (evicted["kind"], evicted["planned"], evicted["steps_repeated"]) == ("resize", True, 0)
    assert (evicted["world_size"], evicted["next_world_size"], evicted["source"]) == (4, 3, "memory")
    # Its node was not asked for again at once.
    assert any(f"node {slow['node'][:8]} is quarantined" in sentence for sentence in run.decisions("quarantine"))
    placed = [event["node"] for event in run.events("SlotPlaced")]
    assert placed.count(slow["node"]) == 1
    # What the others have waited for it has an owner.
    assert run.records("ledger")[-1]["seconds"]["straggler excess"] > 1.0


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
