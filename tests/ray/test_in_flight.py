"""A node is lost just when something is on its way: a replica to another node, a checkpoint's last file to storage."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run, actors_among, wait_until

from elastic.core.checkpoint.snapshots import place_replicas

pytestmark = pytest.mark.ray


def _agent(cluster: LocalCluster, name: str) -> int:
    """The process that holds the memory of a node's snapshots."""
    (pid,) = [pid for pid, title in actors_among(cluster.node(name).pids).items() if "AgentActor" in title]
    return pid


@pytest.mark.slow
def test_a_node_that_is_lost_while_its_replica_is_on_its_way_costs_that_snapshot_only(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    # A stopped agent is to be slow here, and not silent.
    patient = {"suspect_after_s": 60.0, "probe_timeout_s": 60.0}
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, failures=patient)
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_snapshot(6)
    workers = sorted((w for w in run.handle.progress()["workers"] if w["rank"] is not None), key=lambda w: w["rank"])
    nodes = [worker["node"] for worker in workers]
    targets = [target for (target,) in place_replicas(nodes, 1)]
    rank = next(rank for rank in run.away_from_head() if targets[rank] != nodes[0])
    victim = run.node_of(rank)
    receiver = _agent(cluster, run.node_of(nodes.index(targets[rank])).name)
    os.kill(receiver, signal.SIGSTOP)
    try:
        run.allow(7)
        run.reach(7)
        cluster.kill_node(victim.name)
    finally:
        os.kill(receiver, signal.SIGCONT)
    run.allow(8)
    run.wait_generation(2)
    run.finish()

    run.assert_whole()
    (incident, *_) = [incident for incident in run.incidents() if not incident["planned"]]
    assert incident["lost_nodes"] == [victim.node_id]
    assert (incident["source"], incident["resumed_step"], incident["steps_repeated"]) == ("memory", 6, 1)


@pytest.mark.slow
def test_a_node_that_is_lost_while_a_checkpoint_is_being_committed(cluster: LocalCluster, tmp_path: Path) -> None:
    """All shards of step 10 are in storage, the manifest is not: the run goes back to step 5, and when the manifest can
    be written after all, that checkpoint is as good as any."""
    quick = {"storage_backoff_s": 0.1, "storage_backoff_limit_s": 0.2}
    run = Run(cluster, tmp_path, failures=quick)
    in_the_way = Path(run.url) / "run" / "checkpoints" / "step-00000010-g0001" / "manifest.json"
    run.allow(8)
    run.start()
    run.reach(8)
    run.wait_checkpoint(5)
    in_the_way.mkdir(parents=True)
    run.allow(11)
    run.reach(11)
    run.wait_for("the manifest to be refused", lambda _: run.events("SaveFailing"))
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.allow(12)
    run.wait_for("the next generation to begin", lambda _: any("generation 2 begins" in s for s in run.decisions()))
    in_the_way.rmdir()
    run.wait_checkpoint(10)
    run.wait_generation(2)
    second = next(i for i in run.incidents() if not i["planned"])
    assert (second["source"], second["resumed_step"]) == ("storage", 5)
    number = run.handle.progress()["generation"]
    worker = run.worker(run.away_from_head()[0])
    cluster.kill_worker(worker["pid"])
    run.wait_for("the loss to be told", lambda _: len([i for i in run.decisions() if f"generation {number} ends" in i]))
    run.finish()

    run.assert_whole()
    wait_until(lambda: len([i for i in run.incidents() if not i["planned"]]) >= 2, "the second incident's record")
    last = [i for i in run.incidents() if not i["planned"]][-1]
    assert last["resumed_step"] >= 10
