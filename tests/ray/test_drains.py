"""Nodes that give notice, drained by Ray itself: the run leaves them at a step boundary and repeats nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_cluster import LocalCluster, NodeState
from elastic_jobs.cli import main
from elastic_jobs.running.ray_backend import RayBackend
from harness import Run, wait_until

from elastic.core.settings import ScalingSettings

pytestmark = pytest.mark.ray


def carrying(run: Run) -> set[str]:
    return {worker["node"] for worker in run.handle.progress()["workers"]}


def _assert_planned(run: Run) -> None:
    run.assert_whole()
    incidents = run.incidents()
    assert incidents
    assert [incident["planned"] for incident in incidents] == [True] * len(incidents)
    assert [incident["steps_repeated"] for incident in incidents] == [0] * len(incidents)


def test_a_preempted_node_is_left_before_its_time_is_up_and_replaced_when_it_comes_back(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    scaling = ScalingSettings(2, 4, gather_s=1.0)
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=scaling)
    run.allow(6)
    run.start()
    run.reach(6)
    # No checkpoint is due, and nothing happens: they are written down all the same.
    run.wait_for("the steps to be in the journal", lambda _: len(run.steps()) == 6)
    node = run.node_of(run.away_from_head()[0])
    cluster.drain_node(node.name, notice_s=6.0)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 3, "the others to continue without it")
    # Its slot is given back once they train, while it is still there.
    run.walk_until(lambda: node.node_id not in carrying(run), "the slot to be given back")
    # Ray ends a node that is drained as soon as nothing is on it.
    wait_until(lambda: cluster.node(node.name).state is NodeState.LOST, "Ray to end the node")
    cluster.add_node(node.name)
    run.grow_to(4)
    run.finish()

    _assert_planned(run)
    assert run.decisions("function-left") == []
    assert [i["next_world_size"] for i in run.incidents()] == [3, 4]
    assert {i["source"] for i in run.incidents()} == {"memory"}
    assert not run.events("SlotLost")


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_node_that_is_drained_from_the_command_line(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    scaling = ScalingSettings(2, 3, spare_slots=1)
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=scaling)
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_for("the spare to be ready", lambda _: len(run.events("WorkerReady")) == 4)
    node = run.node_of(run.away_from_head()[0])
    assert main(["drain", node.node_id[:12], "--address", cluster.address, "--notice", "60"], RayBackend()) == 0
    number = run.wait_promises()
    run.allow(run.waiting_at + 1)
    run.wait_generation(number + 1)
    run.finish()

    _assert_planned(run)
    assert run.decisions("function-left") == []
    (incident,) = run.incidents()
    assert (incident["world_size"], incident["next_world_size"]) == (3, 3)


@pytest.mark.slow
def test_a_node_that_the_run_needs_is_left_with_a_checkpoint_and_waited_for(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A notice that is shorter than the margin, and nobody else there: everything is saved, and the run waits."""
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=ScalingSettings(4, 4))
    run.allow(6)
    run.start()
    run.reach(6)
    node = run.node_of(run.away_from_head()[0])
    cluster.drain_node(node.name, notice_s=8.0)
    run.wait_promises()
    run.allow(run.waiting_at + 1)
    # Where nobody can continue, storage has it all before anybody leaves.
    run.wait_for("the checkpoint of the last step", lambda _: run.records("checkpoint"))
    wait_until(lambda: run.handle.progress()["world_size"] == 0, "the run to wait for a node")
    wait_until(lambda: cluster.node(node.name).state is NodeState.LOST, "Ray to end the node")
    cluster.add_node(node.name)
    run.wait_generation(2)
    run.finish()

    _assert_planned(run)


def test_a_node_that_nobody_knows_is_refused_in_one_sentence(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "node-77", "--address", cluster.address], RayBackend()) == 2
    told = capsys.readouterr().err
    assert "'node-77'" in told
    assert "node-0" in told
    assert main(["drain", "node-0", "--address", "127.0.0.1:1"], RayBackend()) == 2
    assert "no Ray cluster answers" in capsys.readouterr().err
