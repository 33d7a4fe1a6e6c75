"""Workers that the node's fork server forks: the replacement of a killed one, and what is left of a killed server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from elastic_cluster import LocalCluster
from elastic_cluster.local import processes
from harness import Run, module_cluster, wait_until

from elastic.core.settings import ScalingSettings
from elastic.runtime import names

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Whose workers no other process forks, see forking_node."""
    yield from module_cluster(4, cpus_per_node=1)


def forking(cluster: LocalCluster, folder: Path) -> Run:
    run = Run(cluster, folder, scaling=ScalingSettings(2, 2))
    run.settings = replace(run.settings, fork_workers=True)
    return run


def parent_of(pid: int) -> int:
    return processes.table()[pid].ppid


def is_server(pid: int) -> bool:
    return b"fork_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def has_ended(pid: int) -> bool:
    process = processes.table().get(pid)
    return process is None or process.zombie


def test_a_killed_worker_is_replaced_by_a_fork_and_a_killed_agent_leaves_none(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = forking(cluster, tmp_path)
    run.allow(4)
    run.start()
    run.reach(4)
    killed = run.worker(1)
    server = parent_of(killed["pid"])
    assert is_server(server)
    assert parent_of(run.worker(0)["pid"]) != server

    cluster.kill_worker(killed["pid"])
    run.wait_generation(2)
    replaced = next(w for w in run.handle.progress()["workers"] if w["node"] == killed["node"])
    assert replaced["pid"] != killed["pid"]
    assert parent_of(replaced["pid"]) == server

    # Without the server a worker starts as Ray starts it.
    os.kill(server, signal.SIGKILL)
    cluster.kill_worker(replaced["pid"])
    run.wait_generation(3)
    alone = next(w for w in run.handle.progress()["workers"] if w["node"] == killed["node"])
    assert not is_server(parent_of(alone["pid"]))

    # The other node's server ends with its agent.
    other = parent_of(run.worker(0)["pid"])
    node = run.worker(0)["node"]
    agent = ray.get_actor(names.agent("run", 1, node), names.NAMESPACE)
    ray.kill(agent)
    wait_until(lambda: has_ended(other), "the fork server to end")
    run.finish()
    run.assert_whole()


@pytest.mark.slow
def test_a_run_that_ends_leaves_no_server(cluster: LocalCluster, tmp_path: Path) -> None:
    run = forking(cluster, tmp_path)
    run.allow(3)
    run.start()
    run.reach(3)
    servers = [parent_of(run.worker(rank)["pid"]) for rank in (0, 1)]
    assert all(map(is_server, servers))
    run.finish()
    wait_until(lambda: all(map(has_ended, servers)), "the fork servers to end")
