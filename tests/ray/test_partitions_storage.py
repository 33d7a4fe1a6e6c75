"""A node that loses its way to storage, and to nothing else, while it trains and checkpoints are due.

Five nodes: the head, where the controller is alone, three with a worker each, and one where the checkpoints are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest
from afar import PATIENT, AfarRun, Cluster, begun, each_test
from harness import Record, wait_until
from store_afar import AfarStore

from elastic.core.settings import ScalingSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STORE = 4
FAILURES = {**PATIENT, "storage_timeout_s": 5.0, "storage_backoff_s": 0.5}


@pytest.fixture(scope="module")
def network() -> Iterator[namespaces.Network]:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    with namespaces.Network.made(STORE + 1) as made:
        yield made


@pytest.fixture(scope="module")
def store(network: namespaces.Network) -> Iterator[AfarStore]:
    with AfarStore.on(network, STORE) as made:
        yield made


@pytest.fixture(scope="module")
def nodes(network: namespaces.Network, store: AfarStore) -> Iterator[Cluster]:
    with Cluster.up(network, STORE, store.environment) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    yield from each_test(nodes)


def _cut_off(
    cluster: Cluster, store: AfarStore, folder: Path, run_id: str, scaling: ScalingSettings
) -> tuple[AfarRun, Record]:
    """A run with one checkpoint, and the worker of it that does not reach storage any more."""
    options = {"checkpoints": store.url, "keep_last": 50, "memory": {"every_steps": 1}, "epochs": 4}
    run = begun(cluster, folder, FAILURES, run_id=run_id, scaling=scaling, **options)
    cut = run.worker(1)
    cluster.network.cut(cluster.number(cut["node"]), STORE)
    run.allow(21)
    run.reach(21)
    return run, cut


def _wait_told(run: AfarRun, cut: Record, times: int) -> None:
    """Until the run has said so many times that it is this rank which cannot write."""
    who = f"rank 1 on node {cut['node'][:8]} cannot write its part of the checkpoint of step"

    def told(_: list[Record]) -> bool:
        return sum(sentence.startswith(who) for sentence in run.decisions("storage")) == times

    run.wait_for(f"{who} to be said {times} times", told)


def test_no_checkpoint_is_made_without_the_node_and_the_next_one_when_it_is_back(
    cluster: Cluster, store: AfarStore, tmp_path: Path
) -> None:
    run, cut = _cut_off(cluster, store, tmp_path, "back", ScalingSettings(2, 3))
    _wait_told(run, cut, 1)

    def tried() -> list[Record]:
        """The tries of the newest save; the ranks agree on which of those that are due is made."""
        failing = [event for event in run.events("SaveFailing") if event["worker"] == cut["worker"]]
        return [event for event in failing if event["step"] == failing[-1]["step"]]

    wait_until(lambda: len(tried()) >= 3, "the save to be tried again")
    pauses = [event["retry_s"] for event in tried() if event["retry_s"]]
    assert pauses == [0.5 * 2**number for number in range(len(pauses))]
    saved = f"step-{tried()[-1]['step']:08}-g0001"
    assert [record["step"] for record in run.records("checkpoint")] == [5]
    # The others have written their parts, which are no checkpoint.
    assert store.look("back").complete == ["step-00000005-g0001"]
    assert saved in store.look("back").incomplete
    cluster.network.heal_all()
    run.wait_checkpoint(int(saved[5:13]))
    wait_until(lambda: not store.look("back").incomplete, "what was never complete to be removed")
    run.finish()

    run.assert_whole()
    assert run.incidents() == []
    assert {event["worker"] for event in run.events("SaveFailing")} == {cut["worker"]}
    first, again = run.decisions("storage")
    assert "training continues" in first
    assert again == f"storage accepts checkpoints again: {saved}"
    complete = store.look("back").complete
    assert complete[:2] == ["step-00000005-g0001", saved]
    assert complete[-1] == "step-00000051-g0001"


def test_another_node_that_is_lost_meanwhile_is_recovered_from_memory_and_the_end_is_saved_by_who_can(
    cluster: Cluster, store: AfarStore, tmp_path: Path
) -> None:
    """The way stays shut."""
    run, cut = _cut_off(cluster, store, tmp_path, "shut", ScalingSettings(1, 3))
    _wait_told(run, cut, 1)
    lost = run.worker(2)
    cluster.network.end_processes(cluster.number(lost["node"]))
    run.wait_generation(2)
    run.allow(31)
    _wait_told(run, cut, 2)
    run.finish()

    run.assert_whole()
    first, second = run.incidents()
    assert (first["kind"], first["lost_nodes"], first["source"]) == ("node-lost", [lost["node"]], "memory")
    assert first["next_world_size"] == 2
    assert first["steps_repeated"] in (0, 1)
    assert (second["kind"], second["source"], second["next_world_size"]) == ("resize", "memory", 1)
    assert second["steps_repeated"] in (0, 1)
    assert f"rank 1 on node {cut['node'][:8]} cannot write to it" in second["evidence"]
    complete = store.look("shut").complete
    assert (complete[0], complete[-1]) == ("step-00000005-g0001", "step-00000051-g0003")
    assert len(complete) == 2
