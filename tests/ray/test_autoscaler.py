"""Runs on a cluster with Ray's real autoscaler (v2): they grow as nodes arrive, share them, and end their demand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
import ray
from elastic_cluster import AutoscaledCluster, LocalCluster, NodeState
from harness import Run, wait_until
from traces import Trace, listening_addresses

from elastic.core.settings import ScalingSettings
from elastic.runtime.controller.senses.cluster_view import ClusterProbe
from elastic.runtime.driver import client

pytestmark = pytest.mark.ray

_NODES = 2


@pytest.fixture(scope="module")
def grown() -> Iterator[AutoscaledCluster]:
    """A head without CPUs, and up to two nodes for one worker each, of which none can be had until a test says so."""
    with AutoscaledCluster.launch(_NODES, at_hand=0, cpus_per_node=1, idle_timeout_s=2.0) as cluster:
        footprint = harness.Footprint(cluster)
        client.connect(cluster.address)
        yield cluster
        footprint.look()
        ray.shutdown()
    assert footprint.left() == []


@pytest.fixture
def cloud(grown: AutoscaledCluster) -> Iterator[AutoscaledCluster]:
    """The cluster without a node; and nothing asks for any when the test is over, so that all are given back."""
    grown.offer(0)
    yield grown
    try:
        assert_idle(grown)
    finally:
        harness.remove_runs()


def assert_idle(cluster: AutoscaledCluster) -> None:
    """The autoscaler is asked for nothing, and has given back what it had."""
    look = ClusterProbe()
    wait_until(lambda: not look().demand, "no slot to be asked for")
    wait_until(lambda: not there(cluster), "the idle nodes to be given back")


def there(cluster: AutoscaledCluster) -> list[str]:
    """Nodes that are there or were asked for."""
    return [node.name for node in cluster.nodes() if not node.head and node.state is not NodeState.LOST]


def start(cluster: AutoscaledCluster, folder: Path, run_id: str, scaling: ScalingSettings) -> Run:
    folder.mkdir(exist_ok=True)
    run = Run(cluster, folder, run_id=run_id, scaling=scaling, memory={"every_steps": 1}, every_steps=None)
    run.allow(4)
    return run.start()


def world_size(run: Run) -> int:
    size: int = run.handle.progress()["world_size"]
    return size


def test_a_run_starts_with_what_there_is_grows_as_nodes_arrive_and_gives_up_its_demand_in_the_end(
    cloud: AutoscaledCluster, tmp_path: Path
) -> None:
    run = start(cloud, tmp_path, "grows", ScalingSettings(1, 2, gather_s=0.5))
    wait_until(lambda: len(there(cloud)) == 2, "the autoscaler to have asked for a node per slot")
    said = "the nodes have room for 0: 1 short; waiting for the autoscaler"
    run.wait_for("what is short to be said", lambda _: any(said in told for told in run.decisions("waiting")))
    cloud.offer(1)
    run.reach(4)
    assert (world_size(run), run.handle.progress()["asking_for"]) == (1, "1 more node")
    cloud.offer(2)
    run.grow_to(2)
    number = run.handle.progress()["generation"]
    cloud.kill_node(run.node_of(1).name)
    run.wait_generation(number + 1)
    assert world_size(run) == 1
    wait_until(lambda: len(there(cloud)) == 2, "the autoscaler to have asked for another node")
    # The demand ends with the run, though it was never met.
    run.finish()

    run.assert_whole()
    assert [i["kind"] for i in run.incidents() if not i["planned"]] == ["node-lost"]


def test_what_no_node_type_offers_is_refused_with_what_is_short(cloud: AutoscaledCluster, tmp_path: Path) -> None:
    run = Run(
        cloud, tmp_path, run_id="never", resources={"CPU": 1.0, "TPU": 8.0}, scaling=ScalingSettings(1, 2)
    ).start()
    result = run.ended("no-capacity")
    assert "a worker wants TPU: 8, which no node has" in result["reason"]
    assert result["reason"].endswith("and no node type of the autoscaler offers more")


@pytest.mark.slow
def test_a_run_makes_room_for_one_of_higher_priority_and_grows_again_when_that_is_over(
    cloud: AutoscaledCluster, tmp_path: Path
) -> None:
    cloud.offer(2)
    low = start(cloud, tmp_path / "low", "low", ScalingSettings(1, 2, gather_s=0.5, share_after_s=1.0))
    low.grow_to(2)
    high = start(cloud, tmp_path / "high", "high", ScalingSettings(1, 1, priority=1, share_after_s=1.0))
    low.shrink_to(1)
    high.reach(4)
    high.finish()
    low.grow_to(2)
    low.finish()

    low.assert_whole()
    high.assert_whole()
    assert [(i["planned"], i["steps_repeated"]) for i in low.incidents()] == [(True, 0)] * len(low.incidents())
    assert any("run high of priority 1 (this one: 0) waits for 1 slot" in told for told in low.decisions("share"))


@pytest.mark.slow
def test_two_runs_that_could_hold_half_of_what_they_need_each_both_come_to_their_end(
    cloud: AutoscaledCluster, tmp_path: Path
) -> None:
    """Each needs both of two nodes."""
    runs = [
        start(cloud, tmp_path / name, name, ScalingSettings(2, 2, gather_s=0.5, share_after_s=1.0))
        for name in ("first", "second")
    ]
    # Of these, each run may get one.
    cloud.offer(2)
    wait_until(lambda: any(world_size(run) == 2 for run in runs), "one of them to begin")
    for run in sorted(runs, key=world_size, reverse=True):
        run.reach(4)
        run.finish()
        run.assert_whole()


_OWNER = """
import json, sys
import ray
from elastic_cluster import AutoscaledCluster, NodeState
cluster = AutoscaledCluster.launch(2, at_hand=1, cpus_per_node=1)
ray.init(cluster.address, log_to_driver=False)
for _ in range(2):
    ray.util.placement_group([{"CPU": 1}], lifetime="detached")
while not any(node.state is NodeState.ALIVE and not node.head for node in cluster.nodes()):
    pass
print(json.dumps(str(cluster.socket_path)), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_the_owner_is_killed_while_nodes_are_asked_for() -> None:
    """The autoscaler speaks to the keeper, and is no owner for that."""
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        watcher = LocalCluster.attach(json.loads(owner.stdout.readline()))
        trace = Trace(watcher)
        assert listening_addresses(trace.pids) == {"0100007F", "0000000000000000FFFF00000100007F"}
        watcher.detach()
        owner.kill()
        trace.wait_until_nothing_is_left()
