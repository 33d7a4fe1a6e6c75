"""Cuts that divide a run: two groups, one way only, and one that outlasts a quarantine; recovered from memory.

Six nodes: the head, where the controller is alone, and five with a worker each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from afar import PATIENT, AfarRun, Cluster, begun, each_test, walk_to

from elastic.core.settings import ScalingSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FAILURES = {**PATIENT, "hang_floor_s": 6.0, "quarantine_s": 5.0}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.Network.made(6) as network, Cluster.up(network) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    yield from each_test(nodes)


def _five(cluster: Cluster, folder: Path, epochs: int = 20) -> AfarRun:
    """All five train, with a snapshot at every step."""
    scaling = ScalingSettings(2, 5)
    return begun(cluster, folder, FAILURES, scaling=scaling, memory={"every_steps": 1}, epochs=epochs)


def _sizes(run: AfarRun) -> list[int]:
    return [generation["world_size"] for generation in run.summary()["generations"]]


def _unplanned(run: AfarRun) -> list[dict[str, object]]:
    return [dict(incident) for incident in run.incidents() if not incident["planned"]]


def test_of_three_and_two_that_cannot_reach_each_other_the_three_go_on_from_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = _five(cluster, tmp_path)
    places = [cluster.number(run.worker(rank)["node"]) for rank in range(5)]
    few = {run.worker(rank)["node"] for rank in (1, 4)}
    for one in (places[1], places[4]):
        for other in (places[0], places[2], places[3]):
            cluster.network.cut(one, other)
    walk_to(run, 3)
    cluster.network.heal_all()
    walk_to(run, 5)
    run.finish()

    run.assert_whole()
    (incident,) = _unplanned(run)
    assert set(incident["lost_nodes"]) == few
    assert (incident["source"], incident["next_world_size"]) == ("memory", 3), run.told()
    assert incident["steps_repeated"] in (0, 1)


def test_a_way_that_is_open_in_one_direction_only_is_a_cut(cluster: Cluster, tmp_path: Path) -> None:
    """Either direction, between nodes with nothing held against them."""
    run = _five(cluster, tmp_path, epochs=30)
    pairs: list[tuple[str, ...]] = []
    for direction in (1, -1):
        # Of five only neighbours in gloo's ring talk to each other while they train.
        nodes = [run.worker(rank)["node"] for rank in range(5)]
        around = [(nodes[rank - 1], nodes[rank]) for rank in range(5)]
        pair = next(two for two in around if not any(set(two) & set(other) for other in pairs))[::direction]
        pairs.append(pair)
        cluster.network.cut_one_way(*map(cluster.number, pair))
        walk_to(run, 4)
        cluster.network.heal_all()
        walk_to(run, 5)
    run.finish()

    run.assert_whole()
    assert set(pairs[0]).isdisjoint(pairs[1])
    for incident, pair in zip(_unplanned(run), pairs, strict=True):
        assert len(incident["lost_nodes"]) == 1
        assert set(incident["lost_nodes"]) < set(pair)


def test_a_cut_that_outlasts_the_quarantine_is_found_out_while_the_others_train(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = _five(cluster, tmp_path)
    pair = [run.worker(rank)["node"] for rank in (0, 1)]
    cluster.network.cut(*map(cluster.number, pair))
    run.walk_until(lambda: len(run.decisions("quarantine")) >= 2, "the node to be left alone a second time")
    assert run.handle.progress()["world_size"] == 4
    assert _sizes(run) == [5, 4], "nobody has stopped for it"
    cluster.network.heal_all()
    walk_to(run, 5)
    run.finish()

    run.assert_whole()
    (incident,) = _unplanned(run)
    assert set(incident["lost_nodes"]) < set(pair)
    assert _sizes(run) == [5, 4, 5]
    assert any("is used again" in sentence for sentence in run.decisions())
