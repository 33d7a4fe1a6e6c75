"""A run on the Train page of Ray's dashboard, as the dashboard's own HTTP API gives it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import ray
from elastic_cluster import LocalCluster
from harness import Run, wait_until

from elastic.core.settings import ScalingSettings
from elastic.runtime.controller.train_page import ENABLED_BY

pytestmark = pytest.mark.ray

# Ray Train's state actor is detached and stays, as it does after Ray Train's own runs.
_STATE_ACTOR = ("train_v2_state_actor", "_train_state_actor")


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Two nodes with room for one worker each, and a dashboard that serves the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENABLED_BY, "1")
        yield from harness.module_cluster(2, cpus_per_node=1, dashboard=True)


def _runs(cluster: LocalCluster) -> list[dict[str, Any]]:
    """Empty while the page has nothing to show."""
    try:
        with urllib.request.urlopen(f"{cluster.dashboard_url}/api/train/v2/runs/v1", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["train_runs"]
    except urllib.error.HTTPError as error:
        with error:
            told = error.read().decode()
        assert "Train state data is not available" in told, told
        return []
    return found


def _shown(cluster: LocalCluster, awaited: str, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        return next((run for run in _runs(cluster) if condition(run)), None)

    found: dict[str, Any] = wait_until(look, awaited)
    return found


def _statuses(run: dict[str, Any]) -> list[str]:
    return [attempt["status"] for attempt in run["attempts"]]


def _running_on(world_size: int) -> Callable[[dict[str, Any]], bool]:
    def is_it(run: dict[str, Any]) -> bool:
        attempt = run["attempts"][-1] if run["attempts"] else None
        trains = run["status"] == "RUNNING" and attempt is not None and attempt["status"] == "RUNNING"
        return trains and len(attempt["workers"]) == world_size

    return is_it


def test_a_run_with_a_killed_node_and_a_resumed_one(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, run_id="listed", scaling=ScalingSettings(1, 2), memory={"every_steps": 1})
    run.allow(4)
    run.start()
    run.reach(4)
    shown = _shown(cluster, "the run to be listed", _running_on(2))
    assert shown["id"] == shown["name"] == "listed"
    assert shown["job_details"]["type"] == "DRIVER"
    assert shown["run_settings"]["scaling_config"]["num_workers"] == [1, 2]
    assert shown["run_settings"]["train_loop_config"]["size"] == 127
    assert shown["end_time_ns"] is None
    [first] = shown["attempts"]
    live = {worker["rank"]: worker for worker in run.handle.progress()["workers"]}
    assert [worker["world_rank"] for worker in first["workers"]] == sorted(live)
    for worker in first["workers"]:
        ours = live[worker["world_rank"]]
        assert (worker["pid"], worker["node_id"]) == (ours["pid"], ours["node"])
        # Of Ray's own table of actors: the page has found the actor by its id.
        assert worker["status"] == "ALIVE"
        assert worker["resources"] == {"resources": {"CPU": 1.0}}
        assert Path(worker["log_file_path"]).is_file()

    [away] = run.away_from_head()
    cluster.kill_node(run.node_of(away).name)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 1, "the survivor to train on")
    shown = _shown(cluster, "the survivor to be shown", _running_on(1))
    lost, _ = shown["attempts"]
    assert lost["status"] == "ERRORED"
    assert len(lost["workers"]) == 2
    assert lost["end_time_ns"] > lost["start_time_ns"]
    [incident] = [incident for incident in run.incidents() if not incident["planned"]]
    assert lost["status_detail"] in (incident["evidence"], *incident["also"])

    run.handle.stop("the test has seen enough")
    run.finish("stopped")
    shown = _shown(cluster, "the end to be shown", lambda run: run["status"] == "ABORTED")
    assert "the test has seen enough" in shown["status_detail"]
    assert set(_statuses(shown)) <= {"ERRORED", "ABORTED", "FINISHED"}
    before = len(shown["attempts"])

    run.start().ended("finished")
    shown = _shown(cluster, "the resumed run to be finished", lambda run: run["status"] == "FINISHED")
    assert len(_runs(cluster)) == 1, "one line for a run, however often it was resumed"
    assert len(shown["attempts"]) > before
    assert _statuses(shown)[-1] == "FINISHED"
    assert shown["end_time_ns"] > shown["start_time_ns"]


@pytest.mark.slow
def test_a_killed_controller_continues_its_line(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, run_id="restarted", scaling=ScalingSettings(1, 2))
    run.allow(3)
    run.start()
    run.reach(3)
    mine = lambda run: run["id"] == "restarted" and _running_on(2)(run)  # noqa: E731
    started = _shown(cluster, "the run to be listed", mine)
    cluster.kill_process(run.handle.progress()["controller_pid"])
    run.wait_for("the new controller", lambda _: run.events("ControllerRestarted"))
    run.finish()
    shown = _shown(cluster, "the end", lambda run: run["id"] == "restarted" and run["status"] == "FINISHED")
    assert _statuses(shown) == ["FINISHED"]
    assert shown["attempts"][0]["start_time_ns"] == started["attempts"][0]["start_time_ns"]


def test_without_rays_switch_nothing_is_told(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENABLED_BY)
    run = Run(cluster, tmp_path, run_id="unlisted", scaling=ScalingSettings(1, 1))
    run.allow(1 << 30)
    run.start().ended("finished")
    assert "unlisted" not in {run["id"] for run in _runs(cluster)}


def test_a_user_who_takes_rays_actor_away_does_no_harm(cluster: LocalCluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, run_id="harmed", scaling=ScalingSettings(1, 2), memory={"every_steps": 1})
    run.allow(3)
    run.start()
    run.reach(3)
    _shown(cluster, "the run to be listed", lambda run: run["id"] == "harmed" and _running_on(2)(run))
    ray.kill(ray.get_actor(*_STATE_ACTOR), no_restart=True)
    [away] = run.away_from_head()
    cluster.kill_node(run.node_of(away).name)
    run.walk_until(lambda: run.handle.progress()["world_size"] == 1, "the survivor to train on")
    run.finish()
    run.assert_whole()
