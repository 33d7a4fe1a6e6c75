"""Step reports on their way through the node's agent: whatever becomes of the agent or of the controller, the
controller has each of them, and each step is counted once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from controller_life import BEGUN, LIMIT_S, Controller, begun

from elastic.core import events as ev
from elastic.core.data.steps import StepReport
from elastic.observe import records
from elastic.runtime.controller.actor import ControllerActor
from elastic.runtime.messages import Item, NodeReply, NodeReports
from elastic.runtime.node.report_relay import ReportRelay
from elastic.runtime.worker.delivery import Delivery
from elastic.runtime.worker.outbox import Outbox

STEPS = 6
# Two workers train.
TRAINING = (*BEGUN, ev.GroupJoined(1, 1), ev.TrainingReached(1, 0, 0), ev.TrainingReached(1, 1, 0))


def item(step: int, rank: int, urgent: bool = False) -> Item:
    start = 4 * step + 2 * rank
    report = StepReport(step, 0.5 * (rank + 1), ((start, start + 2),), 2, 0.1, generation=1, rank=rank)
    return Item("step", report, urgent=urgent, replay=True)


MOVED = Item("moved", {"generation": 1, "over": False}, urgent=False)


class Run:
    """Controllers, an agent and two workers' outboxes, as actors are: each call is a future of the actors' thread."""

    def __init__(self, url: Path) -> None:
        self.url = url
        begun(url, TRAINING)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.joined: list[NodeReports] = []
        self.direct: list[int] = []
        self.completed: list[int] = []
        # Called with what the agent has in hand: before it is passed on, and after the controller has taken it.
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.died = asyncio.Event()
        self.start_controller()
        self.relay = ReportRelay("node-a", self._pass_on, lambda: {0, 1}, linger_s=1.0)
        self.handles = SimpleNamespace(
            node_reports=None, deliver=self._method(self._deliver), relay=self._method(self._through_agent)
        )
        self.boxes = []
        for worker in (0, 1):
            delivery = Delivery(worker, self.handles, 3.0)
            delivery.through(self.handles)
            self.boxes.append(Outbox(delivery, on_fenced=lambda: None, retry_s=0.001))

    def start_controller(self) -> None:
        self.controller = Controller(self.url)
        telemetry = self.controller.loop.telemetry
        telemetry.generation_begins(1, 2, 0, self.controller.loop.clock.now())
        counted = telemetry._completed
        telemetry._completed = lambda done, now: (self.completed.append(done.step), counted(done, now))  # type: ignore

    def _method(self, function: Callable[..., Any]) -> Any:
        return SimpleNamespace(remote=lambda *args: asyncio.run_coroutine_threadsafe(function(*args), self.loop))

    async def _deliver(self, worker: int, items: Sequence[Item], heard: int | None) -> Any:
        self.direct += [worker] * sum(item.kind == "step" for item in items)
        return await ControllerActor.deliver(self.controller.actor, worker, items, heard)

    async def _through_agent(self, *args: Any) -> Any:
        delivering = asyncio.ensure_future(self.relay.deliver(*args))
        dying = asyncio.ensure_future(self.died.wait())
        await asyncio.wait((delivering, dying), return_when=asyncio.FIRST_COMPLETED)
        if self.died.is_set():
            raise ray.exceptions.ActorDiedError()
        dying.cancel()
        return delivering.result()

    async def _pass_on(self, reports: NodeReports) -> NodeReply | None:
        self.before()
        if self.died.is_set():
            raise ConnectionError
        reply = await ControllerActor.node_reports(self.controller.actor, reports)
        self.joined += [reports] if reply is not None else []
        self.after()
        return reply

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for rank, box in enumerate(self.boxes):
                box.put(item(step, rank, urgent=step == 1))
            for box in self.boxes:
                assert box.drained(LIMIT_S)

    def close(self) -> None:
        for box in self.boxes:
            box.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def samples(self) -> dict[str, Any]:
        counted: Any = records.samples(self.controller.loop.telemetry.samples.result(4 * STEPS + 4))
        return dict(counted)


def get(call: concurrent.futures.Future[Any], timeout: float) -> Any:
    try:
        return call.result(timeout)
    except concurrent.futures.TimeoutError as error:
        raise ray.exceptions.GetTimeoutError("no answer") from error


@pytest.fixture
def trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(ray, "get", get)
    run = Run(tmp_path)
    yield run
    run.close()


def judge(run: Run) -> None:
    """Each step once, with the samples of both ranks."""
    assert run.completed == list(range(1, STEPS + 1))
    # The first four positions are before step 1.
    assert (run.samples()["missing"], run.samples()["repeated"]) == (4, 0)


def test_an_agent_sends_one_message_for_both_workers(trains: Run) -> None:
    trains.train(1, STEPS)
    judge(trains)
    assert sorted(trains.direct) == [0, 1], "the first step ends a recovery and is sent at once"
    assert [reports.workers for reports in trains.joined if len(reports.workers) == 2]
    assert {part.step for reports in trains.joined for part in reports.steps} == set(range(2, STEPS + 1))


@pytest.mark.parametrize("taken", [False, True], ids=["before the controller has them", "after it has taken them"])
def test_an_agent_that_dies_with_joined_reports_in_hand_loses_none(trains: Run, taken: bool) -> None:
    trains.train(1, 2)
    setattr(trains, "after" if taken else "before", trains.died.set)
    trains.train(3, STEPS)
    judge(trains)
    assert trains.died.is_set()
    assert set(trains.direct[2:4]) == {0, 1}, "each worker has sent its own"


def test_a_controller_that_ends_while_an_agent_joins_gets_to_know_all_of_them_again(trains: Run) -> None:
    trains.train(1, 3)
    replaced = threading.Event()

    def replace() -> None:
        if not replaced.is_set():
            replaced.set()
            trains.completed.clear()
            trains.start_controller()

    # What the first had counted is in no journal: the second hears of every step.
    trains.before = replace
    trains.train(4, STEPS)
    assert replaced.is_set()
    judge(trains)


def test_urgent_messages_and_those_of_a_worker_that_has_heard_of_nobody_do_not_go_through_the_agent() -> None:
    used: list[str] = []

    def method(name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: used.append(name))

    handles = SimpleNamespace(deliver=method("deliver"), relay=method("relay"))
    delivery = Delivery(0, handles, 3.0)
    delivery.through(handles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "get", lambda call, timeout: "answer")
        for items, heard in (([item(2, 0)], None), ([item(2, 0), item(3, 0, urgent=True)], 1), ([MOVED], 1)):
            delivery(items, heard)
            assert used[-1] == "deliver"
        delivery([item(2, 0)], 1)
        assert used[-1] == "relay"


def said(event: ev.Event) -> Item:
    return Item("event", ev.to_json(event))


JOINED, TRAINS = said(ev.GroupJoined(1, 0)), said(ev.TrainingReached(1, 0, 0))
FAILED, LEFT = said(ev.CollectiveFailed(1, 0, 3, "reset")), said(ev.WorkerLeft(1, 0, 3))
RAISED, DONE = said(ev.UserCodeFailed(1, 0, 3, "KeyError", "")), said(ev.WorkerCompleted(1, 0, 3, True))
RESTORED = Item("restored", {"generation": 1})


@pytest.mark.parametrize(
    ("items", "by"),
    [
        ([JOINED], "pass_post"),
        ([JOINED, RESTORED, TRAINS], "pass_post"),
        ([MOVED, TRAINS, item(1, 0, urgent=True)], "pass_post"),
        ([item(1, 0, urgent=True)], "relay"),
        ([LEFT], "pass_post"),
        ([TRAINS, FAILED, LEFT], "pass_post"),
        ([DONE], "pass_post"),
        # Mostly one worker says these, and somebody may wait for them.
        ([RAISED], "deliver"),
        ([RAISED, LEFT], "deliver"),
        ([Item("shard", None, replay=True)], "deliver"),
    ],
)
def test_where_there_are_many_what_all_say_at_a_start_or_an_end_goes_through_the_agent(
    items: list[Item], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def method(name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: used.append(name))

    monkeypatch.setattr(ray, "get", lambda call, timeout: "answer")
    handles = SimpleNamespace(deliver=method("deliver"), relay=method("relay"), pass_post=method("pass_post"))
    delivery = Delivery(0, handles, 3.0)
    delivery.through(handles)
    delivery.many = True
    delivery(items, 1)
    delivery.many = False
    delivery(items, 1)
    assert used == [by, "deliver"]


@pytest.mark.parametrize(
    ("items", "abort_timeout_s", "waits_s"),
    [([JOINED], 1.0, 3.0), ([JOINED, LEFT], 1.0, 0.6), ([LEFT], 30.0, 3.0), ([DONE], 1.0, 0.6)],
)
def test_a_worker_that_is_to_leave_has_time_to_say_so_itself(
    items: list[Item], abort_timeout_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def get(call: Any, timeout: float) -> Any:
        limits.append(timeout)
        if call is not None:
            assert call.limit_s == timeout, "the agent knows it"
            raise ray.exceptions.GetTimeoutError("frozen")

    monkeypatch.setattr(ray, "get", get)
    frozen = SimpleNamespace(pass_post=SimpleNamespace(remote=lambda worker, post: post))
    delivery = Delivery(0, SimpleNamespace(deliver=SimpleNamespace(remote=lambda *_: None)), abort_timeout_s)
    delivery.through(frozen)
    delivery.many = True
    delivery(items, 1)
    assert limits[0] == waits_s
    assert len(limits) == 2


def test_a_worker_without_an_answer_of_its_agent_does_not_ask_it_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    frozen = ray.exceptions.GetTimeoutError("frozen")

    def method(name: str) -> Any:
        return SimpleNamespace(remote=lambda *args: used.append(name) or name)

    def answer(call: str, timeout: float) -> str:
        if call == "relay":
            raise frozen
        return call

    monkeypatch.setattr(ray, "get", answer)
    handles = SimpleNamespace(deliver=method("deliver"), relay=method("relay"))
    delivery = Delivery(0, handles, 3.0)
    delivery.through(handles)
    for step in (2, 3):
        delivery([item(step, 0)], 1)
    assert used == ["relay", "deliver", "deliver"]
    monkeypatch.setattr("elastic.runtime.worker.delivery.time.monotonic", partial(float, 1e12))
    delivery([item(4, 0)], 1)
    assert used[3:] == ["relay", "deliver"]
