"""What Ray's Train page is told of a run, and that nothing at all can go wrong with the run because of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from machine_scenario import Scenario

from elastic.core import events as ev
from elastic.observe.sinks import RunInfo, SinkFeed
from elastic.runtime.controller import train_page
from elastic.runtime.controller.train_page import StateActorSink, enabled, merge, run_record, view

LIMIT_S = 20.0
INFO = RunInfo("r", 1, 1)


class Page:
    """The attempts as the page has them after each view of a story."""

    def __init__(self, story: Scenario) -> None:
        self.story = story
        self.known: dict[str, Mapping[str, Any]] = {}
        self.told: dict[str, Mapping[str, Any]] = {}
        self.run: Mapping[str, Any] = {}

    def look(self, error: str | None = None) -> Page:
        seen = view(self.story.state, lambda worker: f"{worker:02x}", self.story.now, error)
        self.run = seen["run"]
        self.known, changed = merge(self.known, seen)
        self.told.update({attempt["attempt_id"]: attempt for attempt in changed})
        return self

    @property
    def status(self) -> tuple[str, list[str]]:
        return self.run["status"], [attempt["status"] for attempt in self.told.values()]


def test_a_run_from_its_start_over_a_lost_node_and_growth_to_its_end() -> None:
    story = Scenario(low=1, high=3)
    page = Page(story).look()
    assert page.status == ("SCHEDULING", [])
    assert (page.run["start_time_ns"], page.run["end_time_ns"]) == (int(story.state.started_at * 1e9), None)
    story.do(ev.RunStarted()).nodes(2).wait(story.state.settings.scaling.gather_s)
    assert page.look().status == ("INITIALIZING", ["PENDING"])
    story.train()
    assert page.look().status == ("RUNNING", ["RUNNING"])
    [first] = page.told.values()
    assert [(w["world_rank"], w["local_rank"], w["node_rank"], w["node_id"], w["pid"]) for w in first["workers"]] == [
        (0, 0, 0, "node-0", 100), (1, 0, 1, "node-1", 101),
    ]  # fmt: skip
    assert [w["actor_id"] for w in first["workers"]] == ["00", "01"]
    assert first["workers"][1]["log_file_path"].endswith("/r/logs/worker-0001.log")
    assert [part["resources"] for part in first["resources"]] == [{"CPU": 1.0}] * 2

    story.lose_node(1)
    assert page.look().status == ("RESTARTING", ["ERRORED"])
    assert "the raylet is gone" in page.run["status_detail"]
    ended = page.told["generation-1"]
    assert "the raylet is gone" in ended["status_detail"]
    assert [(w["world_rank"], w["status"]) for w in ended["workers"]] == [(0, "DEAD"), (1, "DEAD")], "the lost one too"
    assert ended["end_time_ns"] > ended["start_time_ns"]
    story.left(4)
    assert page.look().status == ("RESTARTING", ["ERRORED", "PENDING"])
    story.train()
    assert page.look().status == ("RUNNING", ["ERRORED", "RUNNING"])

    # A node comes, and all stop at one step.
    story.nodes(1).do(ev.StopPromised(2, 0, 9))
    assert page.look().status == ("RUNNING", ["ERRORED", "RUNNING"])
    story.left(9).commit(9)
    assert page.look().status == ("RESIZING", ["ERRORED", "FINISHED", "PENDING"])
    story.train()
    story.completed(20).commit(20)
    assert page.look().status == ("FINISHED", ["ERRORED", "FINISHED", "FINISHED"])
    assert page.run["end_time_ns"] == int(story.now * 1e9)


def test_a_generation_whose_end_was_not_seen_has_ended_all_the_same() -> None:
    story = Scenario(low=1, high=2).started(2)
    page = Page(story).look()
    story.lose_node(1).left(4).train()
    page.look()
    assert page.status == ("RUNNING", ["FINISHED", "RUNNING"])


@pytest.mark.parametrize("usage", [False, True])
def test_an_error_of_the_user_is_there_with_its_traceback(usage: bool) -> None:
    story = Scenario(low=1, high=2).started(2)
    page = Page(story).look()
    story.do(ev.UserCodeFailed(1, 0, 3, "ValueError: bad", "Traceback ...", usage)).left(3)
    page.look("Traceback (most recent call last)")
    assert page.status == ("ERRORED", ["ERRORED"])
    assert "ValueError: bad" in page.run["status_detail"]
    assert page.run["status_detail"].endswith("Traceback (most recent call last)")


def test_a_stopped_run_is_aborted_as_ray_train_calls_it() -> None:
    story = Scenario(low=1, high=1).started(1)
    page = Page(story).look()
    story.do(ev.StopRequested("by Ada"), ev.StopPromised(1, 0, 5)).left(5).commit(5)
    page.look()
    assert page.status == ("ABORTED", ["ABORTED"])
    assert "by Ada" in page.run["status_detail"]


def test_a_restarted_controller_continues_what_is_there() -> None:
    story = Scenario(low=1, high=2).started(2)
    before = Page(story).look()
    after = Page(story)
    after.known = dict(before.known)
    story.now += 100
    after.look()
    assert after.told["generation-1"]["start_time_ns"] == before.told["generation-1"]["start_time_ns"]
    # It was away when the generation ended.
    again = Page(story.lose_node(1).left(4))
    again.known = dict(before.known)
    again.look()
    assert [(name, a["status"]) for name, a in again.told.items()] == [
        ("generation-1", "ERRORED"), ("generation-2", "PENDING"),
    ]  # fmt: skip


def test_what_ray_keeps_for_ever_is_bounded_in_all_but_one_line_per_generation() -> None:
    story = Scenario(low=1, high=2).started(2)
    known, last = Page(story).look().known, {}
    for number in range(2, 50):
        seen = view(story.state, lambda worker: "", story.now)
        seen["attempt"]["attempt_id"] = f"generation-{number}"
        known, changed = merge(known, seen)
        last.update({attempt["attempt_id"]: attempt for attempt in changed})
    whole = [name for name, attempt in last.items() if attempt["workers"]]
    assert whole == [f"generation-{number}" for number in range(30, 50)]
    assert len(last) == 49
    assert list(known) == whole


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("True", True), ("0", False), (None, False)])
def test_the_switch_is_ray_trains_own(value: str | None, on: bool) -> None:
    assert enabled({} if value is None else {"RAY_TRAIN_ENABLE_STATE_TRACKING": value}) is on


# --- Ray's actor ---


class StateActor:
    """Answers as Ray's does, or as `broken` says."""

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.successor: StateActor | None = None
        self.runs: list[Any] = []
        self.attempts: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, actor: StateActor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *args: Any) -> Any:
        answer: Future[Any] = Future()
        if self.actor.broken is not None:
            answer.set_exception(self.actor.broken)
        else:
            kept = {"create_or_update_train_run": "runs", "create_or_update_train_run_attempt": "attempts"}
            if self.name in kept:
                getattr(self.actor, kept[self.name]).extend(args)
            answer.set_result({"r": {attempt.attempt_id: attempt for attempt in self.actor.attempts}})
        return _Reference(answer)


class _Reference:
    def __init__(self, answer: Future[Any]) -> None:
        self.answer = answer

    def future(self) -> Future[Any]:
        return self.answer


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> StateActor:
    from ray.train.v2._internal.state import state_actor

    fake = StateActor()
    monkeypatch.setattr(state_actor, "get_or_create_state_actor", lambda: fake.successor or fake)
    return fake


def _sink(story: Scenario) -> StateActorSink:
    config = {"lr": 1e-3, "model": object()}
    return StateActorSink(run_record(story.state.settings, config, "01000000", "0f" * 16))


def _seen(story: Scenario) -> dict[str, Any]:
    return view(story.state, lambda worker: f"{worker:032x}", story.now)


def test_rays_schema_and_its_export_take_what_it_is_told(actor: StateActor) -> None:
    from ray.train.v2._internal.state.export import train_run_attempt_to_proto, train_run_to_proto

    story = Scenario(low=1, high=2).started(2)
    sink = _sink(story)
    sink.open(INFO)
    sink.write(_seen(story))
    sink.write(_seen(story.lose_node(1).left(4)))
    sink.close()
    assert [run.status.value for run in actor.runs] == ["RUNNING", "RESTARTING"]
    assert [attempt.status.value for attempt in actor.attempts] == ["RUNNING", "ERRORED", "PENDING"]
    for run in actor.runs:
        train_run_to_proto(run)
        assert run.run_settings.scaling_config.num_workers == (1, 2)
        assert run.run_settings.train_loop_config["lr"] == 1e-3
    for attempt in actor.attempts:
        for worker in attempt.workers:
            worker.node_id = ""  # the story's are no hexadecimal numbers
        train_run_attempt_to_proto(attempt)


def test_an_actor_that_does_not_answer_is_told_later(actor: StateActor, caplog: pytest.LogCaptureFixture) -> None:
    story = Scenario(low=1, high=2).started(2)
    sink = _sink(story)
    sink.open(INFO)
    sink.write(_seen(story))
    actor.broken = ray.exceptions.ActorUnavailableError("away", None)
    with caplog.at_level(logging.WARNING):
        sink.write(_seen(story.lose_node(1)))
        sink.write(_seen(story.left(4)))
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("Ray's Train page is behind, and the run continues; its actor says: The actor None is")
    assert len(actor.runs) == 1
    actor.broken = None
    sink.close()
    assert [run.status.value for run in actor.runs] == ["RUNNING", "RESTARTING", "RESTARTING"]
    assert [attempt.status.value for attempt in actor.attempts] == ["RUNNING", "ERRORED", "PENDING"]


def test_an_actor_that_replaces_a_dead_one_is_told_everything_again(actor: StateActor) -> None:
    story = Scenario(low=1, high=2).started(2)
    sink = _sink(story)
    sink.open(INFO)
    sink.write(_seen(story))
    sink.write(_seen(story.lose_node(1).left(4)))
    actor.broken, actor.successor = ray.exceptions.ActorDiedError(), StateActor()
    sink.write(_seen(story.train()))
    sink.close()
    new = actor.successor
    assert [(a.attempt_id, a.status.value) for a in new.attempts] == [
        ("generation-1", "ERRORED"), ("generation-2", "PENDING"), ("generation-2", "RUNNING"),
    ]  # fmt: skip
    assert [run.status.value for run in new.runs] == ["RUNNING"]


def test_another_api_than_expected_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.train.v2._internal.state import state_actor

    monkeypatch.delattr(state_actor, "get_or_create_state_actor")
    story = Scenario(low=1, high=2).started(2)
    with caplog.at_level(logging.WARNING):
        feed = SinkFeed("Ray's Train page", _sink(story), INFO)
        for _ in range(3):
            feed.put(_seen(story))
        assert feed.close(LIMIT_S)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("sink Ray's Train page is closed, and the run continues: AttributeError")


def test_the_controller_waits_for_nothing_and_tells_what_has_changed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, opened, told = threading.Event(), threading.Event(), []

    class Slow:
        def open(self, run: RunInfo) -> None:
            opened.set()
            gate.wait(LIMIT_S)

        def write(self, record: Mapping[str, Any]) -> None:
            told.append(record["run"]["status"])

        def close(self) -> None: ...

    monkeypatch.setattr(train_page, "StateActorSink", lambda run: Slow())
    monkeypatch.setattr(train_page.ray, "get_runtime_context", _Context)
    story = Scenario(low=1, high=2).started(2)
    page = train_page.TrainPage(story.state.settings, {}, INFO, (), str)
    assert opened.wait(LIMIT_S)
    for _ in range(5):
        page.show(story.state)
    story.do(ev.FirstStepDone(1, 2))
    page.show(story.state)
    page.show(story.lose_node(1).state)
    assert told == [], "it is stuck, and nobody has waited for it"
    gate.set()
    page.close(LIMIT_S)
    assert told == ["RUNNING", "RESTARTING"]


class _Context:
    def get_job_id(self) -> str:
        return "01000000"

    def get_actor_id(self) -> str:
        return "0f" * 16
