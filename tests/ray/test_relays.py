"""Heartbeats and step reports by the agent of another node, as in fleets of more than `nodes_per_relay` nodes: nobody
is accused because of it, and who passes them on may be lost like any other node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from elastic_cluster import LocalCluster, NodeState
from harness import LIMIT_S, Run, module_cluster

from elastic.core.settings import ScalingSettings
from elastic.runtime import names

pytestmark = pytest.mark.ray

NODES = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    yield from module_cluster(NODES, cpus_per_node=1)


def passed_on(run: Run) -> dict[int, int]:
    """Of each rank's node: what the controller has taken from its agent of other nodes' messages."""
    found = {}
    for rank in range(run.handle.progress()["world_size"]):
        agent = ray.get_actor(names.agent(run.settings.run_id, 1, run.worker(rank)["node"]), names.NAMESPACE)
        found[rank] = int(ray.get(agent.passed_on.remote(), timeout=LIMIT_S))
    return found


def relays(run: Run) -> list[int]:
    """The ranks whose nodes pass on what others say."""
    return [rank for rank, count in passed_on(run).items() if count]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(LocalCluster.kill_node, id="killed"),
        pytest.param(LocalCluster.freeze_node, id="frozen", marks=pytest.mark.slow),
    ],
)
def test_a_relay_is_lost_alone_and_a_new_controller_is_found(
    cluster: LocalCluster, tmp_path: Path, fault: Callable[[LocalCluster, str], object]
) -> None:
    run = Run(
        cluster, tmp_path, scaling=ScalingSettings(2, NODES), epochs=20, memory={"every_steps": 1},
        failures={"nodes_per_relay": 2},
    )  # fmt: skip
    run.allow(6)
    run.start()
    run.reach(6)
    run.walk_until(lambda: len(relays(run)) == 2, "two nodes to pass on what the others say")

    cluster.kill_process(run.handle.progress()["controller_pid"])
    before = passed_on(run)
    run.walk_until(
        lambda: any(passed_on(run)[rank] > before[rank] for rank in relays(run)), "a relay to find the new controller"
    )
    assert run.handle.progress()["generation"] == 1

    struck = next(rank for rank in run.away_from_head() if rank in relays(run))
    node = run.worker(struck)["node"]
    name = run.node_of(struck).name
    fault(cluster, name)
    run.wait_generation(2)
    if cluster.node(name).state is NodeState.FROZEN:
        # Its processes then end themselves.
        cluster.thaw_node(name)
    run.finish()
    run.assert_whole()
    lost = [incident["lost_nodes"] for incident in run.incidents() if incident["lost_nodes"]]
    assert lost == [[node]]
