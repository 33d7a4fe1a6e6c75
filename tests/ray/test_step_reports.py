"""Step reports of nodes with several workers, and what these are told and say when a generation starts: by the node's
agent, and nothing is lost with it or a controller."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_cluster import LocalCluster
from harness import LIMIT_S, Run, actor_processes, actors_among, module_cluster

from elastic.core.settings import ScalingSettings
from elastic.runtime import names

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Whose workers no other process forks, see forking_node."""
    yield from module_cluster(2, cpus_per_node=2)


def taken(run: Run, rank: int) -> int:
    """How many reports the controller has taken from the agent of this rank's node."""
    return int(asked(run, rank, "reports_taken"))


def asked(run: Run, rank: int, method: str) -> Any:
    agent = ray.get_actor(names.agent(run.settings.run_id, 1, run.worker(rank)["node"]), names.NAMESPACE)
    return ray.get(getattr(agent, method).remote(), timeout=LIMIT_S)


def test_a_node_sends_the_reports_of_its_workers_together_whoever_is_killed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    # Each node is the relay of its own group: what is told to workers, and what all say at a start, goes by its agent.
    # A busy machine's agents have time for it.
    many = {"nodes_per_relay": 1, "probe_timeout_s": 10.0}
    run = Run(cluster, tmp_path, scaling=ScalingSettings(2, 4, workers_per_slot=2), epochs=20, failures=many)
    run.allow(6)
    run.start()
    run.reach(6)
    # A busy machine may have a worker send its own for a while.
    run.walk_until(lambda: all(taken(run, rank) > 0 for rank in range(4)), "both agents to send reports")
    assert [asked(run, rank, "handed_on") for rank in range(4)] == [(2, 0, 0)] * 4, "both workers of each: begin"
    assert all(asked(run, rank, "posts_taken") > 0 for rank in range(4))

    cluster.kill_process(run.handle.progress()["controller_pid"])
    before = [taken(run, rank) for rank in range(4)]
    run.walk_until(
        lambda: all(taken(run, rank) > count for rank, count in enumerate(before)), "reports to the new controller"
    )
    assert run.handle.progress()["generation"] == 1
    # A second of every start, and of every takeover: who does not train has no torch.
    others = [pid for pid, title in actor_processes(cluster).items() if "WorkerActor" not in title]
    assert len(others) == 1 + 2
    assert [pid for pid in others if "libtorch" in Path(f"/proc/{pid}/maps").read_text()] == []
    if os.geteuid() == 0:
        # Nor do they wait behind the training: Ray has started them with the workers' niceness.
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in others} == {0}

    (agent,) = (
        pid for pid, title in actors_among(run.node_of(run.away_from_head()[0]).pids).items() if "AgentActor" in title
    )
    cluster.kill_process(agent)
    run.wait_generation(2)
    run.finish()
    run.assert_whole()
    assert run.summary()["controllers"] == 2
