"""Heartbeats, step reports and commands by the agent of another node, as in fleets of more than `nodes_per_relay`
nodes: nobody is accused because of it, and who passes them on may be lost or frozen like any other node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from elastic_cluster import LocalCluster, NodeState
from harness import LIMIT_S, Run, actors_among, module_cluster

from elastic.core.settings import ScalingSettings
from elastic.runtime import names

pytestmark = pytest.mark.ray

NODES = 4


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    yield from module_cluster(NODES, cpus_per_node=1)


def passed_on(run: Run) -> dict[int, int]:
    """Of each rank's node: what the controller has taken from its agent of other nodes' messages."""
    return {rank: int(ray.get(agent_of(run, node).passed_on.remote(), timeout=LIMIT_S)) for rank, node in members(run)}


def handed_on(run: Run) -> dict[str, tuple[int, int, int]]:
    """Of each node: how many commands its worker has acknowledged to its agent, and other nodes' agents to this one,
    which have answered it so many questions."""
    return {node: ray.get(agent_of(run, node).handed_on.remote(), timeout=LIMIT_S) for _, node in members(run)}


def members(run: Run) -> list[tuple[int, str]]:
    return [(rank, run.worker(rank)["node"]) for rank in range(run.handle.progress()["world_size"])]


def groups(run: Run) -> dict[int, int]:
    """By rank, the number of its group: two neighbours in the order of their slots."""
    table = ray.util.placement_group_table().values()
    slots = {
        node: int(entry["name"].rpartition(":")[2])
        for entry in table
        if entry["state"] == "CREATED"
        for node in entry["bundles_to_node_id"].values()
    }
    in_order = sorted(members(run), key=lambda member: slots[member[1]])
    return {rank: place // 2 for place, (rank, _) in enumerate(in_order)}


def agent_of(run: Run, node: str) -> Any:
    return ray.get_actor(names.agent(run.settings.run_id, 1, node), names.NAMESPACE)


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
        # A busy machine's agents have time to acknowledge commands.
        failures={"nodes_per_relay": 2, "probe_timeout_s": 5.0},
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
    commands = handed_on(run)
    name = run.node_of(struck).name
    fault(cluster, name)
    run.wait_generation(2)
    # The two nodes of the other group have been told by its relay, and the one that was left alone by the controller.
    now = handed_on(run)
    assert sorted(own > commands[other][0] for other, (own, *_) in now.items()) == [False, True, True]
    # And it has told what the other one of them holds.
    for what in (1, 2):
        assert sorted(done[what] > commands[other][what] for other, done in now.items()) == [False, False, True]
    if cluster.node(name).state is NodeState.FROZEN:
        # Its processes then end themselves.
        cluster.thaw_node(name)
    run.finish()
    run.assert_whole()
    lost = [incident["lost_nodes"] for incident in run.incidents() if incident["lost_nodes"]]
    assert lost == [[node]]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(signal.SIGCONT, id="thawed"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
    ],
)
def test_workers_behind_a_frozen_relay_are_told_all_the_same_and_what_it_held_has_no_effect(
    cluster: LocalCluster, tmp_path: Path, after: signal.Signals
) -> None:
    """Its workers wait in their user's code: nothing but a command ends the generation for them."""
    run = Run(
        cluster, tmp_path, scaling=ScalingSettings(2, NODES), epochs=20,
        failures={"nodes_per_relay": 2, "silent_agent_limit": 1000},
    )  # fmt: skip
    run.allow(6)
    run.start()
    run.reach(6)
    run.walk_until(lambda: len(relays(run)) == 2, "two nodes to pass on what the others say")
    (frozen, *_) = (rank for rank in run.away_from_head() if rank in relays(run))
    agent = agent_process(cluster, run, frozen)
    node = run.worker(frozen)["node"]
    # Of the other group, whose commands go by another agent.
    group = groups(run)
    struck = next(rank for rank in group if group[rank] != group[frozen])

    os.kill(agent, signal.SIGSTOP)
    try:
        cluster.kill_worker(run.worker(struck)["pid"])
        run.wait_for("the generation to end", lambda records: [r for r in records if _ends(r)])
        if after is signal.SIGCONT:
            run.wait_generation(2)
    finally:
        os.kill(agent, after)
    if after is signal.SIGKILL:
        run.wait_generation(2)
    run.finish()
    run.assert_whole()
    # The frozen agent's own node may have been silent for too long; the one behind it speaks for itself meanwhile.
    lost = [incident["lost_nodes"] for incident in run.incidents() if incident["lost_nodes"]]
    assert lost in ([[node]], [] if after is signal.SIGCONT else [[node]])


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(signal.SIGCONT, id="thawed"),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_a_planned_end_is_told_behind_a_relay_that_is_frozen_or_killed_in_between(
    cluster: LocalCluster, tmp_path: Path, after: signal.Signals
) -> None:
    """Frozen before anybody is asked for a promise. Killed, its node is lost when all have promised."""
    run = Run(
        cluster, tmp_path, scaling=ScalingSettings(2, NODES), epochs=20, memory={"every_steps": 1},
        # A busy machine's agents have time to acknowledge, and a frozen one is not accused meanwhile.
        failures={"nodes_per_relay": 2, "probe_timeout_s": 5.0, "suspect_after_s": 30.0, "abort_timeout_s": 20.0},
    )  # fmt: skip
    run.allow(6)
    run.start()
    run.reach(6)
    run.walk_until(lambda: len(relays(run)) == 2, "two nodes to pass on what the others say")
    before = handed_on(run)
    (frozen, *_) = (rank for rank in run.away_from_head() if rank in relays(run))
    group = groups(run)
    other_group = [rank for rank in sorted(group) if group[rank] != group[frozen]]
    drained = next(rank for rank in run.away_from_head() if rank in other_group)
    agent, node = agent_process(cluster, run, frozen), run.worker(frozen)["node"]

    os.kill(agent, signal.SIGSTOP)
    try:
        cluster.drain_node(run.node_of(drained).name, notice_s=60.0)
        run.wait_promises()
        # The other group has promised by its relay: one itself, the other by this one.
        asked = [agent_of(run, run.worker(rank)["node"]).handed_on.remote() for rank in other_group]
        told = [ray.get(one, timeout=LIMIT_S) for one in asked]
        known = [before[run.worker(rank)["node"]] for rank in other_group]
        assert all(now[0] > then[0] for now, then in zip(told, known, strict=True))
        assert any(now[1] > then[1] for now, then in zip(told, known, strict=True))
    finally:
        os.kill(agent, after)
    run.allow(run.waiting_at + 1)
    run.wait_generation(2)
    run.finish()
    run.assert_whole()
    first, *_ = run.incidents()
    lost = [incident["lost_nodes"] for incident in run.incidents() if incident["lost_nodes"]]
    if after is signal.SIGCONT:
        assert (first["planned"], first["steps_repeated"], lost) == (True, 0, [])
    else:
        assert lost == [[node]]


def agent_process(cluster: LocalCluster, run: Run, rank: int) -> int:
    pids = run.node_of(rank).pids
    (pid,) = [pid for pid, title in actors_among(pids).items() if "AgentActor" in title]
    return pid


def _ends(record: Any) -> bool:
    return record["type"] == "decision" and record["sentence"].startswith("generation 1 ends")
