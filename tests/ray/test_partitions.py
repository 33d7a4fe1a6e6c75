"""Nodes that are alive and cannot reach each other, with real cuts between network namespaces.

Four nodes: the head, where the controller is alone, and three with a worker each. Where namespaces are not permitted,
these tests are skipped and say why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from afar import PATIENT, AfarRun, Cluster, assert_unheard, begun, each_test, walk_for, walk_to
from elastic_cluster.local import processes
from harness import given_samples, wait_until

pytestmark = pytest.mark.ray

HEAD = 0
# Felt for longer than that.
BLIP_S = 2.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.Network.made(4) as network, Cluster.up(network) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    yield from each_test(nodes)


@pytest.mark.slow
def test_a_short_cut_is_no_incident_and_a_longer_one_of_the_controller_alone_is_none_either(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Of a worker's node from everything, then of the controller from everybody: for a moment, and for longer than a
    node may be silent, though less than the workers' lease. It is the controller that is away then."""
    run = begun(cluster, tmp_path, PATIENT)
    victim = cluster.number(run.worker(1)["node"])
    for node in (victim, HEAD):
        before = run.handle.progress()["step"]
        cluster.network.isolate(node)
        walk_for(run, BLIP_S)
        cluster.network.heal_all()
        run.allow(before + 10)
        run.reach(before + 10)
    assert len(run.summary()["generations"]) == 1

    cluster.network.isolate(HEAD)
    walk_for(run, 10.0)
    there = run.waiting_at + 5
    run.allow(there)
    # Told by the workers' own files: nobody else is needed for a step.
    wait_until(lambda: len(given_samples(tmp_path).get(there, {}).get(1, {})) == 3, "the workers to train on")
    cluster.network.heal_all()
    run.allow(there + 10)
    run.reach(there + 10)
    _, newest = max((number, step) for step, by_number in given_samples(tmp_path).items() for number in by_number)
    if newest < there:
        cluster.clear()
        raise AssertionError(f"steps that were done are done again; {run.told()}")
    run.finish()

    run.assert_whole()
    assert run.incidents() == []
    assert [generation["world_size"] for generation in run.summary()["generations"]] == [3]


@pytest.mark.slow
def test_two_nodes_that_cannot_reach_each_other_cost_one_of_them(cluster: Cluster, tmp_path: Path) -> None:
    run = begun(cluster, tmp_path, {**PATIENT, "hang_floor_s": 6.0, "quarantine_s": 5.0})
    pair = [run.worker(rank)["node"] for rank in (0, 2)]
    kept = run.worker(1)["node"]
    cluster.network.cut(*map(cluster.number, pair))
    walk_to(run, 2)
    cluster.network.heal_all()
    walk_to(run, 3)
    run.finish()

    run.assert_whole()
    assert [generation["world_size"] for generation in run.summary()["generations"]] == [3, 2, 3]
    (incident,) = (incident for incident in run.incidents() if not incident["planned"])
    assert incident["kind"] == "hang"
    assert len(incident["lost_nodes"]) == 1
    assert set(incident["lost_nodes"]) < set(pair)
    (alone,) = run.decisions("quarantine")
    assert "cannot reach each other" in alone
    assert kept[:8] not in alone


@pytest.mark.slow
def test_a_link_that_goes_down_is_a_lost_node_and_one_that_flaps_is_left_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    failures = {"suspect_after_s": 3.0, "quarantine_s": 20.0}
    run = begun(cluster, tmp_path, failures, epochs=20)
    cut = run.worker(1)
    node = cluster.number(cut["node"])
    cluster.network.link_down(node)
    walk_to(run, 2)
    cluster.network.link_up(node)
    wait_until(lambda: processes.read(cut["pid"]) is None, "the process that was cut off to be gone")
    walk_to(run, 3)
    assert_unheard(run, cut["worker"], 2)

    # Up and down three times. The first time shows a pattern; the others find the node out of the run.
    for _ in range(3):
        cluster.network.isolate(node)
        walk_for(run, 5.0)
        cluster.network.heal_all()
        walk_for(run, 5.0)
    walk_to(run, 3)
    run.finish()

    run.assert_whole()
    lost = [incident for incident in run.incidents() if not incident["planned"]]
    assert [incident["lost_nodes"] for incident in lost] == [[cut["node"]]] * 2
    assert [generation["world_size"] for generation in run.summary()["generations"]] == [3, 2, 3, 2, 3]
    (alone,) = run.decisions("quarantine")
    assert cut["node"][:8] in alone
    _assert_left_alone(run, cut["node"], 20.0)


def _assert_left_alone(run: AfarRun, node: str, seconds: float) -> None:
    """From when the run has said so, and for as long, no slot is placed there."""
    said = next(record["time"] for record in run.records("decision") if record["kind"] == "quarantine")
    placed = [event["time"] for event in run.events("SlotPlaced") if event["node"] == node]
    assert min(when for when in placed if when > said) > said + seconds
