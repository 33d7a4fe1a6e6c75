"""Recovery from the memory of peers, with storage switched off or far behind, on real raylets and with real kills."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from elastic_cluster import LocalCluster
from harness import Run, actor_processes, kill_together, wait_until

from elastic.core.checkpoint.snapshots import place_replicas
from elastic.core.settings import ScalingSettings

pytestmark = pytest.mark.ray


def _nodes_by_rank(run: Run) -> list[str]:
    workers = sorted((w for w in run.handle.progress()["workers"] if w["rank"] is not None), key=lambda w: w["rank"])
    return [worker["node"] for worker in workers]


def _holder_pair(run: Run) -> tuple[int, int]:
    """Two ranks away from the head of which the second one's node holds the only replica of the first one's shard."""
    nodes = _nodes_by_rank(run)
    away = run.away_from_head()
    for rank, (target,) in enumerate(place_replicas(nodes, 1)):
        if rank in away and nodes.index(target) in away:
            return rank, nodes.index(target)
    raise AssertionError(f"no such pair among {nodes}")


def _started(run: Run, step: int = 6) -> Run:
    run.allow(step)
    run.start()
    run.reach(step)
    run.wait_snapshot(step)
    return run


def test_ranks_go_where_their_state_is_and_little_crosses_the_network(cluster: LocalCluster, tmp_path: Path) -> None:
    run = _started(Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None))
    before, gone = _nodes_by_rank(run), run.away_from_head()[-1]
    assert run.away_from_head() == [1, 2, 3], "rank 0 begins on the controller's node"
    cluster.kill_node(run.node_of(gone).name)
    run.wait_generation(2)
    after = _nodes_by_rank(run)
    run.finish()

    run.assert_whole()
    # A quarter of the state was each node's own and one its neighbour's; now a rank has a third. In twelfths:
    held = [{at, (at + 1) % 4} for at in range(4)]
    missing = sum(
        part // 3 not in held[before.index(node)]
        for rank, node in enumerate(after)
        for part in range(4 * rank, 4 * rank + 4)
    )
    assert missing == [1, 3, 1, 0][gone], (before, after)
    assert after[:gone] == before[:gone], "who was there stays what it was"
    restore = run.incidents()[0]["restore"]
    assert restore["bytes_from"]["network"] / restore["bytes_read"] == pytest.approx(missing / 12, abs=0.05), restore


def test_nothing_after_the_end_of_an_epoch_is_done_again(cluster: LocalCluster, tmp_path: Path) -> None:
    """An epoch of six steps, a snapshot after each fourth: without one of the sixth the run would go back to the fifth,
    and the functions begin again, as what they do after an epoch is done."""
    run = Run(cluster, tmp_path, memory={}, every_steps=None, config={"size": 60})
    _started(run, 6)
    cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    run.finish()
    run.assert_whole()
    assert [incident["resumed_step"] for incident in run.incidents() if incident["lost_nodes"]] == [6]
    assert run.decisions("function-left") == []


@pytest.mark.slow
def test_two_nodes_at_once_cost_nothing_where_there_are_two_replicas(cluster: LocalCluster, tmp_path: Path) -> None:
    run = _started(Run(cluster, tmp_path, memory={"every_steps": 1, "replicas": 2}, every_steps=None))
    victims = [run.node_of(rank) for rank in run.away_from_head()[:2]]
    kill_together(cluster, *(victim.name for victim in victims))
    run.walk_until(lambda: run.handle.progress()["world_size"] == 2, "the two others to train on")
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert {node for incident in lost for node in incident["lost_nodes"]} == {victim.node_id for victim in victims}
    assert [incident["source"] for incident in lost] == ["memory"] * len(lost)
    assert sum(incident["steps_repeated"] for incident in lost) == 0
    assert [checkpoint["step"] for checkpoint in run.records("checkpoint")] == [max(run.steps())]


def test_where_a_shard_and_its_replica_are_both_gone_storage_is_next(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, memory={"every_steps": 1})
    _started(run).wait_checkpoint(5)
    kill_together(cluster, *(run.node_of(rank).name for rank in _holder_pair(run)))
    run.wait_for("the run to fall back to storage", lambda _: any("from storage" in s for s in run.decisions()))
    run.walk_until(lambda: run.handle.progress()["world_size"] == 2, "the two others to train on")
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert (lost[-1]["source"], lost[-1]["resumed_step"]) == ("storage", 5)
    # Nobody was asked for what was gone: the nodes had said what they hold.
    assert not run.events("RestoreFailed")


@pytest.mark.slow
def test_the_holder_of_the_replica_dies_while_the_loss_of_its_owner_is_recovered(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = _started(Run(cluster, tmp_path, memory={"every_steps": 1, "replicas": 2}, every_steps=None))
    first, second = (run.node_of(rank) for rank in run.away_from_head()[:2])
    cluster.kill_node(first.name)
    run.wait_for("the next generation to begin", lambda _: any("generation 2 begins" in s for s in run.decisions()))
    cluster.kill_node(second.name)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 2, "the two others to train on")
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert {incident["source"] for incident in lost} == {"memory"}
    assert sum(incident["steps_repeated"] for incident in lost) <= 1


def test_a_killed_worker_costs_nothing_and_the_controller_may_go_with_a_node(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = _started(Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None))
    killed = run.worker(run.away_from_head()[0])
    cluster.kill_worker(killed["pid"])
    run.wait_generation(2)
    run.grow_to(4)
    number = run.handle.progress()["generation"]
    run.allow(run.waiting_at + 2)
    run.reach(run.waiting_at)
    run.wait_snapshot(run.waiting_at)
    victim = run.node_of(run.away_from_head()[-1])
    cluster.kill_process(run.handle.progress()["controller_pid"])
    cluster.kill_node(victim.name)
    run.wait_generation(number + 1)
    run.finish()

    run.assert_whole()
    incidents = run.incidents()
    lost = [incident for incident in incidents if not incident["planned"]]
    # A controller that was not there when the node went cannot tell whether it only stands still.
    assert [incident["kind"] in ("node-lost", "node-frozen") for incident in lost] == [False, True]
    assert [incident["lost_nodes"] for incident in lost] == [[], [victim.node_id]]
    assert {incident["source"] for incident in incidents} == {"memory"}
    assert [incident["steps_repeated"] for incident in incidents] == [0] * len(incidents)
    assert run.summary()["controllers"] == 2


def test_with_a_spare_the_run_goes_on_at_the_same_size_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    scaling = ScalingSettings(2, 3, spare_slots=1)
    run = Run(cluster, tmp_path, memory={"every_steps": 1}, every_steps=None, scaling=scaling)
    _started(run)
    wait_until(lambda: len(run.handle.progress()["workers"]) == 4, "the spare to be asked for")
    run.wait_for("the spare to be ready", lambda _: len(run.events("WorkerReady")) == 4)
    assert run.handle.progress()["world_size"] == 3
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(2)
    run.finish()

    run.assert_whole()
    (incident,) = run.incidents()
    assert (incident["world_size"], incident["next_world_size"]) == (3, 3)
    assert (incident["source"], incident["steps_repeated"]) == ("memory", 0)


def _no_more_descriptors(run: Run, cluster: LocalCluster) -> None:
    """From here on the nodes' agents can make no segment, and take no connection."""
    agents = [pid for pid, title in actor_processes(cluster).items() if "AgentActor" in title]
    assert len(agents) == len(run.handle.progress()["workers"])
    for pid in agents:
        most = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_memory_that_no_node_can_give_is_told_and_storage_is_next(
    cluster: LocalCluster, tmp_path: Path, required: bool
) -> None:
    run = Run(cluster, tmp_path, memory={"every_steps": 4, "required": required}, scaling=ScalingSettings(2, 3))
    run.allow(2)
    run.start()
    run.reach(2)
    _no_more_descriptors(run, cluster)
    told = "no more snapshots are taken into memory: rank "
    if required:
        outcome = run.finish("usage")
        assert told in outcome["reason"]
        assert "the job's snapshots.required ends the run" in outcome["reason"]
        return
    run.walk_until(lambda: any(told in one for one in run.decisions("memory")), "the lost tier to be told")
    last = 5 * (run.waiting_at // 5)
    run.wait_checkpoint(last)
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(2)
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert (lost[0]["source"], lost[0]["resumed_step"]) == ("storage", last)


def test_copies_of_shards_on_other_nodes_are_the_replicas(cluster: LocalCluster, tmp_path: Path) -> None:
    """Two copies of two shards, and nothing is sent for snapshots: of a lost node its copy is read, twice."""
    more = {"every_steps": None, "config": {"engine": "fsdp2", "shard_workers": 2}}
    (tmp_path / "still").mkdir()
    still = Run(cluster, tmp_path / "still", run_id="still", **more)
    still.allow(1 << 30)
    still.start().finish()
    run = Run(cluster, tmp_path, memory={"every_steps": 1, "replicas": 0}, **more)
    _started_with_copies(run, 6)
    cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    cluster.add_node()
    run.grow_to(4)
    _reached_with_copies(run, run.waiting_at + 2)
    number = run.handle.progress()["generation"]
    cluster.kill_node(run.node_of(run.away_from_head()[0]).name)
    run.wait_generation(number + 1)
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert [incident["source"] for incident in lost] == ["memory", "memory"]
    assert sum(incident["steps_repeated"] for incident in lost) == 0
    assert run.losses() == pytest.approx(still.losses(), rel=4e-6, abs=4e-6)


def _started_with_copies(run: Run, step: int) -> None:
    run.allow(step)
    run.start()
    _reached_with_copies(run, step)


def _reached_with_copies(run: Run, step: int) -> None:
    """Each of four nodes has the whole of one of two shards."""
    run.allow(step)
    run.reach(step)

    def whole() -> bool:
        held = sorted((each.rank, each.world_size) for node in run.memory() for each in node if each.step == step)
        return held == [(0, 2), (0, 2), (1, 2), (1, 2)]

    wait_until(whole, f"both copies of the snapshot of step {step} to be complete")
