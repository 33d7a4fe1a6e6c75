"""What takes long and is no hang: a set-up that computes, an evaluation, work of one rank alone, an export after the
last step, a restore from slow storage."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster import LocalCluster
from harness import Run, wait_until

from elastic.core.settings import ScalingSettings

pytestmark = pytest.mark.ray


def test_what_takes_long_without_a_step_is_no_hang(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(
        cluster, tmp_path, "loops:evaluates_and_exports", scaling=ScalingSettings(2, 2),
        config={"slow_s": 7.0, "set_up_s": 9.0}, epochs=1, failures={"hang_floor_s": 4.0, "join_timeout_s": 6.0},
    ).start()  # fmt: skip
    run.finish()
    run.assert_whole()
    assert run.incidents() == []
    assert run.events("SetUpProgressed")


def test_a_restore_from_slow_storage_may_take_longer_than_a_join(cluster: LocalCluster, tmp_path: Path) -> None:
    """A second for every 64 bytes: as a whole twice `join_timeout_s`, which limits how long nothing moves."""
    run = Run(
        cluster, tmp_path, "loops:restores_slowly", scaling=ScalingSettings(1, 1), config={"part_s": 1.0},
        epochs=1, failures={"join_timeout_s": 30.0},
    )  # fmt: skip
    run.allow(6)
    run.start()
    run.reach(6)
    run.wait_checkpoint(5)
    os.kill(run.worker(0)["pid"], signal.SIGKILL)
    run.wait_generation(2)
    run.finish()
    run.assert_whole()
    (incident,) = (incident for incident in run.incidents() if not incident["planned"])
    assert incident["kind"] == "worker-lost"
    assert incident["restore"]["read_s"] > 30.0
    assert len(run.events("RestoreProgressed")) > 3


@pytest.mark.parametrize("asks", [False, True])
def test_a_newcomer_sets_up_while_the_others_train(cluster: LocalCluster, tmp_path: Path, asks: bool) -> None:
    """Also where it asks for its place first, as most scripts do."""
    run = Run(cluster, tmp_path, "loops:sets_up_while_held", scaling=ScalingSettings(1, 2), config={"asks": asks})
    join_after_a_set_up(run, lambda: wait_until((tmp_path / "sets up").exists, "the new worker to call its function"))
    assert sorted(path.read_text() for path in tmp_path.glob("told-*")) == ["0 of 2", "1 of 2", "1 of 2"] * asks
    assert len({path.read_text() for path in tmp_path.glob("name-*")}) == asks, "one name for all of them"
    assert run.decisions("function-left") == []


def test_a_set_up_that_is_longer_than_a_start_may_be_holds_up_nobody(cluster: LocalCluster, tmp_path: Path) -> None:
    """As long as it makes progress: here it says that it is busy."""
    limits = {"worker_start_timeout_s": 50.0}
    run = Run(cluster, tmp_path, "loops:sets_up_busily", scaling=ScalingSettings(1, 2), failures=limits)

    def goes_on(_: Any) -> bool:
        return len(run.events("WorkerSettingUp")) == 2

    join_after_a_set_up(run, lambda: run.wait_for("the second time that the set-up goes on", goes_on))
    assert run.events("WorkerStartFailed") == []


def join_after_a_set_up(run: Run, holds: Callable[[], Any]) -> None:
    """Of two workers one is killed; the other trains until the new one's set-up `holds`, and on; then it joins."""
    run.allow(6)
    run.start()
    run.reach(6)
    hold = run.folder / "hold"
    hold.touch()
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    run.allow(7)
    run.wait_generation(2)
    holds()
    run.allow(14)
    run.reach(14)
    assert run.handle.progress()["generation"] == 2
    hold.unlink()
    run.walk_until(lambda: run.handle.progress()["world_size"] == 2, "the new worker to join")
    run.finish()
    run.assert_whole()


@pytest.mark.parametrize("asks", [True, False])
def test_a_spare_has_done_its_set_up_and_made_its_passes(cluster: LocalCluster, tmp_path: Path, asks: bool) -> None:
    """It came before the run's first step, when nobody knew a place or a pass, and is told when the others train."""
    scaling = ScalingSettings(2, 2, spare_slots=1)
    config = {"asks": asks, "compiled": True}
    run = Run(cluster, tmp_path, "loops:sets_up_while_held", scaling=scaling, memory={"every_steps": 1}, config=config)
    run.allow(6)
    run.start()
    run.reach(6)

    def told() -> list[str]:
        # With a dot in its name one is being written.
        return sorted(path.read_text() for path in tmp_path.glob("told-*") if "." not in path.name)

    wait_until(lambda: told() == ["0 of 2", "1 of 2", "1 of 2"] * asks, "the spare to know its place")
    run.wait_for("the spare to have made its passes", lambda _: run.decisions("rehearsed"))
    assert " made 1 forward" in run.decisions("rehearsed")[0]
    lost = run.worker(1)["pid"]
    os.kill(lost, signal.SIGKILL)
    run.walk_until(lambda: run.handle.progress()["generation"] == 2, "the spare to take the place")
    run.finish()
    run.assert_whole()
    (incident,) = run.incidents()
    assert (incident["kind"], incident["world_size"], incident["next_world_size"]) == ("worker-lost", 2, 2)
    assert len({path.read_text() for path in tmp_path.glob("name-*")}) == asks, "one name for all of them"
    assert run.decisions("function-left") == []


def test_another_number_of_workers_sums_up_together_in_the_generation_that_one_joins(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two of four nodes are lost, one comes back: the sum of four is not one of three."""
    run = Run(cluster, tmp_path, "loops:sums_up", scaling=ScalingSettings(1, 4))
    run.allow(6)
    run.start()
    run.reach(6)
    for allowed, generation in ((8, 2), (10, 3)):
        run.cluster.kill_node(run.node_of(run.away_from_head()[-1]).name)
        run.allow(allowed)
        run.wait_generation(generation)
        run.reach(allowed)
    assert run.decisions("function-left") == [], "nobody joins: who stays has what it has"
    run.cluster.add_node()
    run.wait_for("the new worker to be ready", lambda _: len(run.events("WorkerReady")) == 5)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 3, "the new worker to join")
    assert run.handle.progress()["generation"] == 4, "no generation has failed for it"
    run.finish()
    run.assert_whole()
    left = run.decisions("function-left")
    assert left
    assert all("all_reduce in its set-up was among 4 ranks, and there are 3 from here on" in why for why in left), left
    sums = [int(path.read_text()) for path in tmp_path.glob("sum-*")]
    assert sorted(sums) == [3, 3, 3, 4, 4], "two went with their nodes"
