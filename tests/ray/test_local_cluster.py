"""Real raylets: lost, frozen and brought back; and nothing is left of a cluster, however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_cluster import ClusterEnded, ClusterError, LocalCluster, NodeInfo, NodeState
from elastic_cluster.local import processes
from elastic_cluster.local.node_table import TAG
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from traces import LIMIT_S, Trace, listening_addresses, wait_until

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=1, max_restarts=0)
class Worker:
    def pid(self) -> int:
        return os.getpid()

    def tag(self) -> str:
        return os.environ[TAG]

    def orphan(self) -> int:
        """Starts a process with nothing to know it by: no parent, nor session, nor environment of ours."""
        shell = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        return int(subprocess.run(["/bin/sh", "-c", shell], env={}, stdout=subprocess.PIPE, check=True).stdout)


def worker_on(node: NodeInfo) -> Any:
    return Worker.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()


@pytest.fixture
def connect() -> Iterator[Callable[[LocalCluster], None]]:
    yield lambda cluster: ray.init(cluster.address, log_to_driver=False)
    ray.shutdown()


def starter_pid(cluster: LocalCluster) -> int:
    raylet = processes.read(cluster.node("node-0").raylet_pid)
    assert raylet is not None
    init = processes.read(raylet.ppid)
    assert init is not None
    return init.ppid


def ray_node(node: NodeInfo) -> dict[str, Any]:
    return next(entry for entry in ray.nodes() if entry["NodeID"] == node.node_id)


def test_a_cluster_is_what_was_asked_for(connect: Callable[[LocalCluster], None], tmp_path: Path) -> None:
    current = Path("/tmp/ray/ray_current_cluster")
    before = current.read_text() if current.exists() else None
    options: dict[str, Any] = {"cpus_per_node": 3, "gpus_per_node": 2, "resources": {"spot": 1}}
    with LocalCluster.start(2, **options, labels={"zone": "a"}, logs_to=tmp_path / "logs") as cluster:
        nodes = cluster.nodes()
        assert [(node.name, node.head, node.state) for node in nodes] == [
            ("node-0", True, NodeState.ALIVE),
            ("node-1", False, NodeState.ALIVE),
        ]
        connect(cluster)
        for node in nodes:
            entry = ray_node(node)
            assert entry["Alive"]
            assert entry["NodeName"] == node.name
            assert {key: entry["Resources"][key] for key in ("CPU", "GPU", "spot")} == {"CPU": 3, "GPU": 2, "spot": 1}
            assert entry["Labels"]["zone"] == "a"
        assert ray.get(worker_on(nodes[1]).tag.remote()) == f"{cluster.directory.name}/node-1/1"
        trace = Trace(cluster)
        assert listening_addresses(trace.pids) == {"0100007F", "0000000000000000FFFF00000100007F"}
        # Nobody's plain ray.init() must find this cluster.
        assert (current.read_text() if current.exists() else None) == before
        ray.shutdown()
    assert trace.left() == []
    assert list((tmp_path / "logs").glob("raylet*"))


def test_a_killed_node_is_gone_at_once_and_can_be_brought_back(connect: Callable[[LocalCluster], None]) -> None:
    with LocalCluster.start(3, cpus_per_node=1) as cluster:
        connect(cluster)
        workers = [worker_on(node) for node in cluster.nodes()]
        pids = ray.get([worker.pid.remote() for worker in workers])
        orphan = ray.get(workers[2].orphan.remote())
        for node, pid in zip(cluster.nodes(), pids, strict=True):
            assert pid in node.pids

        victim = cluster.node("node-2")
        killed = cluster.kill_node("node-2")
        assert killed.state is NodeState.LOST
        assert {victim.raylet_pid, pids[2], orphan, *victim.pids} <= set(killed.pids)
        alive = {pid for pid in killed.pids if processes.read(pid) is not None}
        assert alive == set()
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(workers[2].pid.remote(), timeout=LIMIT_S)
        assert ray.get([worker.pid.remote() for worker in workers[:2]]) == pids[:2]
        with pytest.raises(ClusterError, match="node-2 is lost"):
            cluster.kill_node("node-2")

        back = cluster.add_node()
        assert (back.name, back.lives, back.state) == ("node-2", 2, NodeState.ALIVE)
        assert back.node_id != victim.node_id
        assert ray_node(back)["Alive"]
        assert ray.get(worker_on(back).pid.remote(), timeout=LIMIT_S) in cluster.node("node-2").pids
        trace = Trace(cluster)
        ray.shutdown()
    assert trace.left() == []


def test_a_frozen_node_stands_still_until_it_is_thawed(connect: Callable[[LocalCluster], None]) -> None:
    with LocalCluster.start(2, cpus_per_node=1) as cluster:
        connect(cluster)
        worker = worker_on(cluster.node("node-1"))
        pid = ray.get(worker.pid.remote())
        frozen = cluster.freeze_node("node-1")
        assert pid in frozen.pids
        states = {process.state for p in frozen.pids if (process := processes.read(p)) is not None}
        assert states == {"T"}
        assert cluster.node("node-1").state is NodeState.FROZEN
        with pytest.raises(ClusterError, match="node-1 is frozen and cannot leave in good order"):
            cluster.remove_node("node-1")
        answer = worker.pid.remote()
        assert ray.wait([answer], timeout=0.5)[0] == []
        assert cluster.thaw_node("node-1").state is NodeState.ALIVE
        assert ray.get(answer, timeout=LIMIT_S) == pid
        ray.shutdown()


def test_single_processes_are_killed_only_if_they_are_the_clusters_own(connect: Callable[[LocalCluster], None]) -> None:
    with LocalCluster.start(2, cpus_per_node=1) as cluster, LocalCluster.start(1) as other:
        connect(cluster)
        worker = worker_on(cluster.node("node-1"))
        pid = ray.get(worker.pid.remote())
        raylet = cluster.node("node-1").raylet_pid
        for foreign in (os.getpid(), cluster.keeper_pid, other.keeper_pid, other.node("node-0").raylet_pid):
            with pytest.raises(ClusterError, match=f"process {foreign} belongs to no node"):
                cluster.kill_process(foreign)
        with pytest.raises(ClusterError, match=f"process {raylet} runs node-1 itself"):
            cluster.kill_worker(raylet)

        assert cluster.kill_worker(pid).name == "node-1"
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(worker.pid.remote(), timeout=LIMIT_S)
        assert cluster.node("node-1").state is NodeState.ALIVE

        assert cluster.kill_process(raylet).name == "node-1"
        assert cluster.node("node-1").state is NodeState.LOST
        assert cluster.add_node("node-1").lives == 2

        assert cluster.remove_node("node-1").state is NodeState.LOST
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) <= 2, lambda: "the removed node to leave Ray")
        # Its neighbour has noticed nothing.
        assert [node.state for node in other.nodes()] == [NodeState.ALIVE]
        ray.shutdown()


_OWNER = """
import json, sys
from elastic_cluster import LocalCluster
cluster = LocalCluster.start(2, cpus_per_node=1)
print(json.dumps(str(cluster.socket_path)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """Another process that has started a cluster of two nodes; the first line of its output is the socket's path."""
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdin=-1, stdout=-1, text=True) as process:
        yield process
        process.kill()


def _socket_path(owner: subprocess.Popen[str]) -> str:
    assert owner.stdout is not None
    path: str = json.loads(owner.stdout.readline())
    return path


def test_a_follower_takes_over_from_a_killed_owner(owner: subprocess.Popen[str]) -> None:
    follower = LocalCluster.attach(_socket_path(owner))
    trace = Trace(follower)
    owner.kill()
    owner.wait()
    # The keeper sees the owner's end before it sees this command, which was sent after it.
    assert [node.state for node in follower.nodes()] == [NodeState.ALIVE] * 2
    follower.freeze_node("node-1")
    follower.detach()
    trace.wait_until_nothing_is_left()


def test_nothing_is_left_when_the_owner_is_killed(owner: subprocess.Popen[str]) -> None:
    watcher = LocalCluster.attach(_socket_path(owner))
    trace = Trace(watcher)
    watcher.freeze_node("node-1")
    watcher.detach()
    owner.kill()
    trace.wait_until_nothing_is_left()


@pytest.mark.parametrize("victim", ["keeper", "starter"])
def test_nothing_is_left_when_a_guardian_is_killed(victim: str, connect: Callable[[LocalCluster], None]) -> None:
    cluster = LocalCluster.start(2, cpus_per_node=1)
    connect(cluster)
    worker = worker_on(cluster.node("node-1"))
    pids = {ray.get(worker.pid.remote()), ray.get(worker.orphan.remote())}
    trace = Trace(cluster)
    assert pids <= trace.pids
    ray.shutdown()
    cluster.freeze_node("node-1")
    os.kill(cluster.keeper_pid if victim == "keeper" else starter_pid(cluster), signal.SIGKILL)
    trace.wait_until_nothing_is_left()
    with pytest.raises(ClusterEnded):
        cluster.nodes()
    cluster.shutdown()


def test_what_both_guardians_leave_is_cleared_by_the_next_cluster(connect: Callable[[LocalCluster], None]) -> None:
    cluster = LocalCluster.start(2, cpus_per_node=1)
    connect(cluster)
    ray.get(worker_on(cluster.node("node-1")).pid.remote())
    trace = Trace(cluster)
    ray.shutdown()
    cluster.freeze_node("node-1")
    guardians = (starter_pid(cluster), cluster.keeper_pid)
    # Stopped first, so that neither sees the other die.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in guardians:
            os.kill(pid, number)
    cluster.shutdown()
    with LocalCluster.start(1):
        trace.wait_until_nothing_is_left()


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "A_TEST": str(tmp_path)}
    with pytest.raises(ClusterError, match=r"node-0 did not start: .*1 GPU, but CUDA_VISIBLE_DEVICES"):
        LocalCluster.start(1, gpus_per_node=1, environment=environment)
    left = [p.pid for p in processes.table().values() if processes.environment(p.pid).get("A_TEST") == str(tmp_path)]
    assert left == []


def test_a_cluster_is_up_while_its_agents_still_import(tmp_path: Path) -> None:
    """A raylet that waits for them crashes after 15 s, which a busy machine needs."""
    come = tmp_path / "come"
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, time\n"
        "line = pathlib.Path('/proc/self/cmdline').read_bytes()\n"
        "while b'agent.py' in line or b'runtime_env/agent' in line:\n"
        "    time.sleep(0.1)\n"
        f"    if pathlib.Path({str(come)!r}).exists(): break\n"
    )
    with LocalCluster.start(2, cpus_per_node=1, dashboard=True, environment={"PYTHONPATH": str(tmp_path)}) as cluster:
        assert {node.name for node in cluster.nodes()} == {"node-0", "node-1"}
        come.touch()
