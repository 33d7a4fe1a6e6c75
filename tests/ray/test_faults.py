"""Faults of single parts: a worker's process, a frozen node, a hung rank, the controller."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from elastic_cluster import LocalCluster
from elastic_cluster.local import processes
from harness import Run, given_samples, something_in_the_way, wait_until

from elastic.core.names import parse_checkpoint_id
from elastic.core.settings import ScalingSettings
from elastic.runtime import names

pytestmark = pytest.mark.ray


def test_a_killed_worker_is_replaced_and_a_frozen_node_comes_back_as_a_newcomer(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    # New workers import beside the others: on two cores a node that is in good order may be silent for 2 s.
    run = Run(cluster, tmp_path, failures={"suspect_after_s": 3.0})
    run.allow(6)
    run.start()
    run.reach(6)
    killed = run.worker(run.away_from_head()[0])
    cluster.kill_worker(killed["pid"])
    run.wait_generation(2)
    run.grow_to(4)
    workers = {w["worker"]: w for w in run.handle.progress()["workers"]}
    assert killed["worker"] not in workers
    # The node was in good order: its next worker is on the same one.
    assert [w["pid"] for w in workers.values() if w["node"] == killed["node"]] != [killed["pid"]]
    assert len({w["node"] for w in workers.values()}) == 4

    number = run.handle.progress()["generation"]
    victim = run.away_from_head()[-1]
    frozen, node = run.worker(victim), run.node_of(victim)
    cluster.freeze_node(node.name)
    run.wait_generation(number + 1)
    assert run.handle.progress()["world_size"] == 3
    run.allow(run.waiting_at + 6)
    run.reach(run.waiting_at)
    cluster.thaw_node(node.name)
    wait_until(lambda: processes.read(frozen["pid"]) is None, "the late waker's process to be gone")
    run.grow_to(4)
    back = [w for w in run.handle.progress()["workers"] if w["node"] == node.node_id]
    assert [w["worker"] for w in back] != [frozen["worker"]]
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert [incident["kind"] for incident in lost] == ["worker-lost", "node-frozen"]
    assert [incident["lost_workers"] for incident in lost] == [[killed["worker"]], [frozen["worker"]]]
    assert [incident["lost_nodes"] for incident in lost] == [[], [node.node_id]]
    _assert_no_checkpoint_of_a_generation_that_was_over(run)


def test_a_hung_rank_is_noticed_left_out_and_replaced(cluster: LocalCluster, tmp_path: Path) -> None:
    fault = {"kind": "hang-once", "rank": 1, "step": 8}
    config = {"fault": fault, "stage": 1}
    failures = {"hang_floor_s": 5.0, "join_timeout_s": 60.0}
    run = Run(cluster, tmp_path, config=config, failures=failures, epochs=12, memory={"every_steps": 1})
    run.allow(9)
    run.start()
    hung = run.worker(1)
    run.wait_generation(2)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 4, "the hung worker to be replaced")
    assert hung["worker"] not in [w["worker"] for w in run.handle.progress()["workers"]]
    run.finish()

    run.assert_whole()
    (incident,) = (incident for incident in run.incidents() if not incident["planned"])
    assert incident["kind"] == "hang"
    assert incident["lost_workers"] == [hung["worker"]]
    assert incident["lost_nodes"] == []
    assert incident["step"] == 8
    # What it did not do: the others were kept, and the run continued with them at once.
    assert (incident["next_generation"], incident["next_world_size"]) == (2, 3)
    # They had done their four of the step's five micro-batches, and waited for it.
    assert run.decisions("step-continued") == ["step 9 continues: the gradients of 4 of its micro-batches are kept"]
    stalled = run.events("ProgressStalled")
    assert stalled[0]["stalled_s"] > stalled[0]["limit_s"]


def test_training_goes_on_while_the_controller_is_away_and_a_recovery_while_it_is(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path)
    run.allow(6)
    run.start()
    run.reach(6)
    before = {w["worker"]: w["pid"] for w in run.handle.progress()["workers"]}
    cluster.kill_process(run.handle.progress()["controller_pid"])
    run.allow(16)
    # Told by the workers' own files: nobody else is needed for a step.
    wait_until(lambda: len(given_samples(tmp_path).get(16, {}).get(1, {})) == 4, "the workers to train on")
    run.reach(16)
    now = run.handle.progress()
    assert now["generation"] == 1
    assert {w["worker"]: w["pid"] for w in now["workers"]} == before

    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    cluster.kill_process(now["controller_pid"])
    run.wait_generation(2)
    assert run.handle.progress()["world_size"] == 3
    run.finish()

    run.assert_whole()
    summary = run.summary()
    assert summary["controllers"] == 3
    assert [generation["world_size"] for generation in summary["generations"]] == [4, 3]
    assert summary["attempts"] == 1
    assert sum("has taken over after a restart" in sentence for sentence in run.decisions()) == 2


def test_an_event_that_the_controller_cannot_handle_costs_a_restart_and_no_run(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path, scaling=ScalingSettings(2, 2))
    run.allow(6)
    run.start()
    run.reach(6)
    before = run.handle.progress()
    controller = ray.get_actor(names.controller("run"), names.NAMESPACE)
    # No journal line can be made of it.
    controller.stop.remote({"a set"})
    wait_until(lambda: run.handle.progress()["controller_pid"] != before["controller_pid"], "another controller")
    run.finish()

    run.assert_whole()
    (fault,) = run.decisions("controller-fault")
    assert "TypeError: Object of type set is not JSON serializable" in fault
    assert run.summary()["controllers"] == 2
    assert [generation["world_size"] for generation in run.summary()["generations"]] == [2]


@pytest.mark.slow
def test_a_generation_that_is_in_no_journal_is_ended_and_its_number_is_not_used_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = Run(cluster, tmp_path, scaling=ScalingSettings(2, 2))
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_checkpoint(5)
    with something_in_the_way(Path(run.url) / "run" / "journal"):
        cluster.kill_worker(run.worker(1)["pid"])
        run.allow(8)
        # Nobody waits for storage: the run continues as soon as there is another worker.
        wait_until(lambda: run.handle.progress()["generation"] > 1, "another generation to begin")
        run.reach(8)
        unknown = run.handle.progress()["generation"]
        cluster.kill_process(run.handle.progress()["controller_pid"])
    run.wait_generation(unknown + 1)
    run.finish()

    run.assert_samples_once()
    assert any(f"workers know of generation {unknown}" in sentence for sentence in run.decisions())
    assert not [event for event in run.events("FirstStepDone") if 1 < event["generation"] <= unknown]


def _assert_no_checkpoint_of_a_generation_that_was_over(run: Run) -> None:
    """In the order of the journal no checkpoint is of an older generation than one that had done a step before it."""
    newest = 0
    for record in run.records():
        if record["type"] == "event" and record["event"] == "FirstStepDone":
            newest = record["generation"]
        elif record["type"] == "checkpoint":
            assert parse_checkpoint_id(record["id"]).generation >= newest, record
