"""Gradients that travel otherwise, on real nodes, two of which are killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import Run, four_three_two_four
from undisturbed import Outcome, Undisturbed, whole_state

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.settings import CommunicationSettings, ScalingSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

_CONFIG: dict[str, Any] = {"stage": 1, "dtype": "fp32", "optimizer": "adamw", "dropout": 0.1}
# As in test_runs.py: noise between world sizes is 3e-7 to 5e-7.
_CEILING = 4e-6


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    made = Undisturbed()
    yield made
    made.close()


def test_exact_strategies_through_killed_nodes_are_the_undisturbed_run(
    cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    # The last generation is long enough for a close look at all three strategies (15 steps).
    options: dict[str, Any] = {"memory": {"every_steps": 1}, "communication": CommunicationSettings(), "epochs": 3}
    run = Run(cluster, tmp_path, config=_CONFIG, **options)
    four_three_two_four(run)
    run.assert_whole()
    still = undisturbed.train(run.config, 3, tmp_path / "four", 4)
    moved = Outcome(whole_state(CheckpointStore(run.url, "run")), run.losses())
    assert still.distance(moved) <= _CEILING
    told = _told(run)
    # Each generation tries each strategy, and says what they cost as soon as it knows.
    assert told.count("each in turn: until it is known what they cost") == len(run.incidents()) + 1
    assert all(f"{strategy} " in told[-1] for strategy in ("all_reduce", "ring", "tree"))


def test_what_is_owed_survives_killed_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    settings = CommunicationSettings("error_feedback", "top_k", density=0.05)
    run = Run(cluster, tmp_path, config=_CONFIG, memory={"every_steps": 1}, communication=settings)
    four_three_two_four(run)
    run.assert_whole()
    assert all(restore["bytes_read"] == restore["bytes_needed"] > 0 for restore in run.records("restore"))
    assert set(_told(run)) == {"top_k: as the job says"}
    saved = whole_state(CheckpointStore(run.url, "run"))
    residuals = {name for name in saved if name.startswith("kept/share/residual/")}
    # Four nodes at the end, each with its own of every parameter.
    trained = {name.removeprefix("exp_avg/") for name in saved if name.startswith("exp_avg/")}
    assert residuals == {f"kept/share/residual/{node}/{name}" for node in range(4) for name in trained}
    assert any(float(saved[name].abs().max()) > 0 for name in residuals)


def test_a_killed_island_goes_back_to_the_last_outer_step(
    cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """On as many nodes it then trains as if nothing had happened, each island with its own optimizer's state."""
    config, local = {**_CONFIG, "stage": 0}, CommunicationSettings("local", "diloco", every_steps=3)
    run = Run(
        cluster, tmp_path, config=config, memory={"every_steps": 1}, communication=local, epochs=1,
        scaling=ScalingSettings(3, 3),
    )  # fmt: skip
    run.allow(8)
    run.start()
    run.reach(8)
    run.wait_snapshot(6)
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    run.finish()
    run.assert_whole()
    (incident,) = run.incidents()
    assert (incident["resumed_step"], incident["steps_repeated"]) == (6, 2)
    still = undisturbed.train(run.config, 1, tmp_path / "three", 3, communication=local, nodes=(0, 1, 2))
    moved = Outcome(whole_state(CheckpointStore(run.url, "run")), run.losses())
    assert any(name.startswith("kept/share/island/2/3/exp_avg/") for name in moved.state)
    assert still.distance(moved) == 0.0
    assert set(_told(run)) == {"diloco: 3 islands of 1 and 1 and 1 ranks, an outer step every 3 steps"}


def test_late_gradients_through_killed_nodes_are_the_undisturbed_run(
    cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Which weights a step is computed with does not depend on the number of nodes."""
    config, late = {**_CONFIG, "stage": 0}, CommunicationSettings("async", staleness=2, every_steps=3)
    run = Run(cluster, tmp_path, config=config, memory={"every_steps": 1}, communication=late)
    run.allow(8)
    run.start()
    run.reach(8)
    # The gradients of steps 7 and 8 are under way: the run goes back to the end of the round before.
    run.wait_snapshot(6)
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    run.allow(20)
    run.reach(20)
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()
    run.assert_whole()
    lost = next(incident for incident in run.incidents() if incident["kind"] != "resize")
    assert (lost["resumed_step"], lost["steps_repeated"]) == (6, 2)
    still = undisturbed.train(run.config, 2, tmp_path / "four", 4, communication=late)
    moved = Outcome(whole_state(CheckpointStore(run.url, "run")), run.losses())
    assert still.distance(moved) <= _CEILING
    exact = undisturbed.train(run.config, 2, tmp_path / "exact", 4)
    assert exact.distance(moved) > 1e-3, "late gradients are another run"


def test_after_a_killed_node_the_run_goes_on_from_the_servers_of_the_others(
    cluster: LocalCluster, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The node's worker, agent and server are gone at once. Saved was step 6; steps 7 and 8 are not computed again."""
    config = {**_CONFIG, "stage": 0}
    served = CommunicationSettings("async", "parameter_server", staleness=0, every_steps=3)
    run = Run(cluster, tmp_path, config=config, memory={"every_steps": 1}, communication=served)
    run.allow(8)
    run.start()
    run.reach(8)
    run.wait_snapshot(6)
    run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
    run.wait_generation(2)
    run.allow(20)
    run.reach(20)
    run.cluster.add_node()
    run.grow_to(4)
    run.finish()
    run.assert_whole()
    assert any("updates 7 to 8 are taken over from its servers" in sentence for sentence in _told(run))
    still = undisturbed.train(run.config, 2, tmp_path / "four", 4)
    moved = Outcome(whole_state(CheckpointStore(run.url, "run")), run.losses())
    assert still.distance(moved) <= _CEILING


def _told(run: Run) -> list[str]:
    return [step["travel"] for record in run.records("steps") for step in record["steps"] if "travel" in step]
