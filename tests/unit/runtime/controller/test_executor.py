"""What the executor does with actors that die or cannot be reached; no Ray, the actors are plain objects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.errors import ElasticError, Fenced, StorageError, UsageError
from elastic.core.generation_spec import GenerationSpec, Rendezvous
from elastic.core.settings import RunSettings, SnapshotSettings
from elastic.entrypoint import parse_entry_point
from elastic.runtime.controller.hands import executor as executor_module
from elastic.runtime.controller.hands import workers as workers_module
from elastic.runtime.controller.hands.executor import Executor
from elastic.runtime.controller.hands.node_measures import link_class
from elastic.runtime.messages import Command, NodeFacts, Part
from elastic.runtime.node.agent import unreachable
from elastic.runtime.node.downlink import Downlink
from elastic.runtime.train_function import Entry
from elastic.runtime.worker import actor as worker_module
from elastic.runtime.worker.actor import WorkerActor

FACTS = NodeFacts("box", ("127.0.0.1", 1), "name")
SETTINGS = RunSettings("run", snapshots=SnapshotSettings(False))
LIMIT_S = 20.0


class Actor:
    """Every method is `answer`, called with the method's name and arguments."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any) -> asyncio.Future[Any]:
                # A command is told by its own name; the incarnation comes before it.
                given = args[1:] if method in ("command", "handed") else (method, *args)
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                try:
                    answer.set_result(self._answer(*given))
                except (ray.exceptions.RayError, ElasticError) as error:
                    answer.set_exception(error)
                return answer

        return Method


def dead(*_: Any) -> Any:
    raise ray.exceptions.ActorDiedError


def alive(*_: Any) -> Any:
    return ()


def without_memory(*_: Any) -> Any:
    raise ray.exceptions.RayTaskError(
        "prepare", "...", StorageError("this node's memory of snapshots cannot be reached")
    )


def unavailable(*_: Any) -> Any:
    raise ray.exceptions.ActorUnavailableError("connection reset", None)


def made(events: list[ev.Event], settings: RunSettings = SETTINGS) -> Executor:
    return Executor(settings, 1, 1, Entry(), None, b"t" * 32, events.append, lambda *_: None, lambda *_: None)


async def known(answer: Callable[..., Any]) -> tuple[Any, NodeFacts]:
    return Actor(answer), FACTS


async def settled(work: Executor) -> None:
    while work._tasks:
        await asyncio.wait(tuple(work._tasks), timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("worker", "agent", "kept"),
    [
        (dead, alive, True),
        (lambda *_: {"pid": 1}, dead, False),
        # Seen: an agent that had ended unnoticed was given to worker after worker, until its node was quarantined.
        (without_memory, dead, False),
        (without_memory, alive, True),
        (without_memory, unavailable, True),
    ],
)
def test_a_worker_that_dies_while_it_starts_takes_no_agent_along(
    monkeypatch: pytest.MonkeyPatch, worker: Any, agent: Any, kept: bool
) -> None:
    """The agent holds the node's memory: without it no survey would find what lies there, and no generation begin."""
    events: list[ev.Event] = []

    async def scenario() -> bool:
        work = made(events)
        work._agents._tasks["node"] = asyncio.ensure_future(known(agent))
        work.placed(0, "node")
        monkeypatch.setattr(work._slots, "group", lambda slot: "group")
        monkeypatch.setattr(work._workers, "_create", lambda number, group, launcher: Actor(worker))
        work.perform(act.StartWorker(3, 0))
        await settled(work)
        return "node" in work._agents.nodes

    assert asyncio.run(scenario()) is kept
    assert [type(event) for event in events] == [ev.WorkerStartFailed]


@pytest.mark.parametrize("forked", [False, True])
def test_a_worker_imports_while_the_agent_of_its_node_starts(monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    """Both import for seconds. A forked worker has nothing to import, and the agent says how it is forked."""
    events: list[ev.Event] = []
    called: list[str] = []

    async def scenario() -> None:
        work, begun, up = made(events, replace(SETTINGS, fork_workers=forked)), asyncio.Event(), asyncio.Event()

        def worker(method: str, *_: Any) -> dict[str, Any]:
            called.append(method)
            begun.set()
            return {"pid": 1, "host": "host"}

        async def agent() -> tuple[Any, NodeFacts]:
            await up.wait()
            called.append("agent")
            return await known(lambda *_: None)

        work._agents._tasks["node"] = asyncio.ensure_future(agent())
        work.placed(0, "node")
        monkeypatch.setattr(work._slots, "group", lambda slot: "group")
        monkeypatch.setattr(work._workers, "_create", lambda number, group, launcher: Actor(worker))
        work.perform(act.StartWorker(3, 0))
        if not forked:
            await asyncio.wait_for(begun.wait(), LIMIT_S)
        up.set()
        await settled(work)

    asyncio.run(scenario())
    assert called == (["agent", "prepare"] if forked else ["preload", "agent", "prepare"])
    assert events == [ev.WorkerReady(3, 1, "host")]


def test_a_worker_whose_slot_is_released_before_it_exists_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[ev.Event] = []
    killed: list[Any] = []
    late = Actor(dict)

    async def scenario() -> dict[int, Any]:
        work, slow = made(events), asyncio.Event()

        async def agent() -> tuple[Any, NodeFacts]:
            await slow.wait()
            return await known(dict)

        work._agents._tasks["node"] = asyncio.ensure_future(agent())
        work.placed(0, "node")
        monkeypatch.setattr(work._slots, "group", lambda slot: "group")
        monkeypatch.setattr(work._workers, "_create", lambda number, group, launcher: late)
        monkeypatch.setattr(workers_module, "_kill", killed.append)
        work.perform(act.StartWorker(3, 0))
        work.perform(act.KillWorker(3, "not needed"))
        await asyncio.sleep(0)
        slow.set()
        await settled(work)
        return work._workers.handles

    assert asyncio.run(scenario()) == {}
    assert killed == [late]
    assert events == []


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_generation_that_a_member_has_not_heard_of_ends_at_once(monkeypatch: pytest.MonkeyPatch, deaf: int) -> None:
    monkeypatch.setattr(executor_module, "_BEGIN_RETRY_S", 0.0)
    events: list[ev.Event] = []

    async def scenario() -> None:
        work = made(events)
        for worker in (0, 1):
            work._workers.handles[worker] = Actor(unavailable if worker == deaf else lambda *_: "store")
        work.perform(act.BeginGeneration(4, (0, 1), None, 7))
        await settled(work)

    asyncio.run(scenario())
    (failed,) = events
    assert isinstance(failed, ev.CollectiveFailed)
    assert (failed.generation, failed.step) == (4, 7)
    assert f"worker {deaf} cannot be reached" in failed.error


def test_a_member_that_can_be_reached_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(executor_module, "_BEGIN_RETRY_S", LIMIT_S)
    events: list[ev.Event] = []
    told: list[str] = []

    def later(method: str, *_: Any) -> Any:
        told.append(method)
        return "store" if len(told) > 5 else unavailable()

    async def scenario() -> None:
        work = made(events)
        work._workers.handles[0] = Actor(later)
        work.perform(act.BeginGeneration(4, (0,), None, 7))
        await settled(work)

    asyncio.run(scenario())
    assert events == []
    assert told == ["host_store"] * 6 + ["begin"]


@pytest.mark.parametrize(
    ("action", "method", "limit_s"),
    [
        (act.ProposeStop(4, (0,)), "propose_stop", 30.0),
        (act.CommitStop(4, (0,), 9), "commit_stop", 30.0),
        (act.EndGeneration(4, (0,), "over"), "end", 3.0),
    ],
)
def test_a_member_that_cannot_be_reached_for_a_moment_is_told_to_stop_all_the_same(
    monkeypatch: pytest.MonkeyPatch, action: act.Action, method: str, limit_s: float
) -> None:
    monkeypatch.setattr(workers_module, "_ASK_AGAIN_S", 0.0)
    events: list[ev.Event] = []
    told: list[str] = []

    def later(name: str, *_: Any) -> Any:
        told.append(name)
        return (9, True) if len(told) > 7 else unavailable()

    async def scenario() -> None:
        work = made(events)
        assert work._stop_retry_s == 30.0
        work._workers.handles[0] = Actor(later)
        work.perform(action)
        await settled(work)

    asyncio.run(scenario())
    assert told == [method] * 8
    assert events == ([ev.StopPromised(4, 0, 9, True)] if method == "propose_stop" else [])


def test_a_worker_that_obeys_a_newer_controller_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    events: list[ev.Event] = []

    def refuses(*_: Any) -> Any:
        raise Fenced("controller 1 was replaced")

    async def scenario() -> None:
        work = made(events)
        work._workers.handles[0] = Actor(refuses)
        work.perform(act.EndGeneration(4, (0,), "over"))
        work.perform(act.ProposeStop(4, (0,)))
        await settled(work)

    asyncio.run(scenario())
    assert events == []
    assert "worker 0 refuses end: controller 1 was replaced" in caplog.text


def test_a_worker_obeys_the_newest_controller_that_it_has_heard_of() -> None:
    worker = WorkerActor(0, SETTINGS, Entry(parse_entry_point("json:dumps")), None, b"t" * 32)
    assert worker.command(1, "ping")
    assert worker.reattach(3) == 0
    with pytest.raises(Fenced, match="controller 2 was replaced: worker 0 obeys controller 3"):
        worker.command(2, "end", 1, "an old controller's word")
    assert worker._over == 0
    with pytest.raises(Fenced):
        worker.reattach(2)
    assert worker.command(4, "ping")
    with pytest.raises(UsageError, match="no command 'prepare'"):
        worker.command(4, "prepare")


def test_a_worker_says_what_starts_a_generation_by_whom_it_was_told_to_begin() -> None:
    worker = WorkerActor(0, SETTINGS, Entry(parse_entry_point("json:dumps")), None, b"t" * 32)
    for told, many in ((worker.command, False), (worker.handed, True), (worker.command, False)):
        assert told(2, "ping")
        assert worker._delivery.many is many
    with pytest.raises(Fenced):
        worker.handed(1, "ping")
    assert not worker._delivery.many


def test_a_worker_is_in_the_slot_that_it_was_assigned_last() -> None:
    workers = made([])._workers
    for worker, slot in ((0, 5), (1, 5), (2, 6), (0, 6), (1, 5)):
        workers.assign(worker, slot)
    assert [workers.in_slot(slot) for slot in (5, 6, 7)] == [[1], [2, 0], []]
    workers.end(2)
    workers.end(1)
    assert [workers.in_slot(slot) for slot in (5, 6)] == [[], [0]]
    assert workers._in_slot.keys() == {6}


def test_a_generation_that_has_begun_or_is_over_is_not_begun_again() -> None:
    """A command comes twice where an acknowledgement was lost."""
    worker = WorkerActor(0, SETTINGS, Entry(parse_entry_point("json:dumps")), None, b"t" * 32)
    worker._over = 4
    worker.command(1, "begin", GenerationSpec("run", 4, 0, 2), Rendezvous("host", 1), 1, None)
    assert worker._current is None
    with pytest.raises(AssertionError):
        # It would begin, if it were prepared.
        worker.command(1, "begin", GenerationSpec("run", 5, 0, 2), Rendezvous("host", 1), 1, None)


# Of a worker, by command.
ANSWERS: dict[str, Callable[[int], Any]] = {
    "host_store": lambda _: "store", "propose_stop": lambda worker: (9, worker % 2 == 0) if worker != 17 else None,
}  # fmt: skip


@pytest.mark.parametrize("relays", [False, True])
def test_a_generation_of_many_is_begun_stopped_and_ended_by_agents(relays: bool) -> None:
    nodes, ranks = 10, 8
    events: list[Any] = []
    calls: list[str] = []
    told: dict[int, list[tuple[Any, ...]]] = {}

    async def scenario() -> None:
        def relay_of(node: str) -> str | None:
            return f"n{int(node[1:]) // 5 * 5}" if relays else None

        nothing: Any = lambda *_: None  # noqa: E731
        work = Executor(SETTINGS, 1, 1, Entry(), None, b"t" * 32, events.append, nothing, nothing, relay_of=relay_of)

        def worker(number: int, by: str) -> Actor:
            def answer(method: str, *args: Any) -> Any:
                if method != "host_store":
                    calls.extend(["a worker"] * (by == "controller"))
                    told.setdefault(number, []).append((method, *args))
                return ANSWERS.get(method, lambda _: None)(number)

            return Actor(answer)

        agents = {}
        for place in range(nodes):
            downlink = Downlink(f"n{place}", lambda incarnation: None, nothing)
            for number in range(place * ranks, (place + 1) * ranks):
                downlink.workers[number] = worker(number, "agent")
                work._workers.assign(number, place)
                work._workers.handles[number] = worker(number, "controller")
            agents[f"n{place}"] = downlink
            work.placed(place, f"n{place}")

        def agent(node: str) -> Any:
            def hand_on(command: Command, parts: dict[str, Part]) -> Any:
                calls.append(node)
                sent = {name: part._replace(agent=part.agent and plain(name)) for name, part in parts.items()}
                return agents[node].hand_on(command, sent)

            return SimpleNamespace(hand_on=SimpleNamespace(remote=hand_on))

        def plain(node: str) -> Any:
            return SimpleNamespace(hand_on=SimpleNamespace(remote=agents[node].hand_on))

        async def started(node: str) -> tuple[Any, NodeFacts]:
            return agent(node), FACTS

        for node in agents:
            work._agents._tasks[node] = asyncio.ensure_future(started(node))
        await asyncio.sleep(0)
        members = tuple(range(nodes * ranks))
        work.perform(act.BeginGeneration(4, members, None, 7))
        work.perform(act.ProposeStop(4, members))
        work.perform(act.CommitStop(4, members, 9, True, last=True))
        work.perform(act.EndGeneration(3, members, "over"))
        await settled(work)

    asyncio.run(scenario())
    assert sorted(calls) == sorted((["n0", "n5"] if relays else [f"n{place}" for place in range(nodes)]) * 4)
    for rank, commands in told.items():
        (begun,) = (arguments for method, *arguments in commands if method == "begin")
        spec, *own = begun
        assert (spec.generation, spec.world_size, own) == (4, nodes * ranks, ["store", rank, None])
        others = [("propose_stop", 4), ("commit_stop", 4, 9, True, True), ("end", 3, "over")]
        assert [command for command in commands if command[0] != "begin"] == others
    assert len(told) == nodes * ranks
    # One has no such generation.
    assert sorted(events, key=lambda event: event.worker) == [
        ev.StopPromised(4, worker, 9, worker % 2 == 0) for worker in range(nodes * ranks) if worker != 17
    ]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_survey_does_not_wait_for_the_agent_of_a_node_that_is_new(
    monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """It holds nothing. Seen: where another node's slot came before the survey, a recovery took a second more, while
    that node's agent was starting. One that a restarted controller looks for may hold snapshots."""
    events: list[ev.Event] = []
    asked: list[str] = []

    async def scenario() -> None:
        work, up = made(events, replace(SETTINGS, snapshots=SnapshotSettings())), asyncio.Event()

        async def start(node: str) -> tuple[Any, NodeFacts]:
            await up.wait()
            return await agent(node)

        async def agent(node: str) -> tuple[Any, NodeFacts]:
            return await known(lambda *_: asked.append(node) or ())

        monkeypatch.setattr(work._agents, "_start", start)
        work._agents._tasks["old"] = asyncio.ensure_future(agent("old"))
        starting = None
        if restarted:
            work._agents.attach("new")
            up.set()
        else:
            starting = asyncio.ensure_future(work._agents.started("new"))
            await asyncio.sleep(0)
        work.perform(act.QuerySnapshots(1, ("old", "new"), False))
        await settled(work)
        up.set()
        if starting is not None:
            await starting
        work.perform(act.QuerySnapshots(2, ("old", "new"), True))
        await settled(work)

    asyncio.run(scenario())
    # By the second survey each is also asked whom of the others it can reach.
    assert sorted(asked) == (["new"] * 3 if restarted else ["new"] * 2) + ["old"] * 3
    for event in events:
        assert isinstance(event, ev.SnapshotsReported)
        assert (event.missing, event.unreachable) == ((), ())


def test_all_nodes_are_tried_at_once() -> None:
    """A node that is cut off from many must say so before the survey is over."""
    others = {f"node-{number}": ("127.0.0.1", number) for number in range(40)}
    together = threading.Barrier(len(others))

    def reaches(address: tuple[str, int]) -> bool:
        together.wait(LIMIT_S)
        return address[1] % 2 == 0

    found = asyncio.run(unreachable(others, reaches))
    assert found == tuple(f"node-{number}" for number in range(1, 40, 2))
    assert asyncio.run(unreachable({}, reaches)) == ()


def test_a_worker_is_prepared_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted controller asks again for every worker that was starting; two training threads would be too many."""
    imported: list[int] = []
    monkeypatch.setattr(worker_module, "_address", lambda: "127.0.0.1")
    monkeypatch.setattr(worker_module, "HeartbeatSender", lambda *args: None)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [])
    monkeypatch.setattr(WorkerActor, "_import", lambda self: imported.append(1))
    monkeypatch.setattr(WorkerActor, "_train", lambda self: self._set_up.set())
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    worker = WorkerActor(0, SETTINGS, Entry(parse_entry_point("json:dumps")), None, b"t" * 32)
    answers: list[Any] = []
    asking = [threading.Thread(target=lambda: answers.append(worker.prepare(FACTS))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(LIMIT_S)
    worker._outbox.close()
    assert len(answers) == 4
    assert all(answer == answers[0] for answer in answers)
    assert imported == [1]


RATES = {"gemm": 1e11, "memory": 1e10, "disk": 1e9}
WAYS = ((1024, 1e-4),), ((1024, 2e-4),)


def measuring(node: Callable[..., Any], partner: Callable[..., Any] | None) -> list[ev.Event]:
    """Of a run in which "node" joins, with "partner" idle: what is told."""
    events: list[ev.Event] = []

    async def scenario() -> None:
        work = made(events)
        work._agents._tasks["node"] = asyncio.ensure_future(known(node))
        if partner is not None:
            work._agents._tasks["partner"] = asyncio.ensure_future(known(partner))
        work.perform(act.MeasureNode("node", ("gone", "partner")))
        work.placed(0, "node")
        waits = asyncio.ensure_future(work._measures.ended("node"))
        await settled(work)
        await asyncio.wait_for(waits, LIMIT_S)
        await asyncio.wait_for(work._measures.ended("node"), LIMIT_S)

    asyncio.run(scenario())
    return events


def agent(method: str, *_: Any) -> Any:
    return RATES if method == "measure" else WAYS


def test_a_node_is_measured_with_the_first_idle_node_that_answers() -> None:
    events = measuring(agent, agent)
    # Both say nothing of their machine, nor of their zone.
    assert events == [ev.NodeMeasured("node", tuple(RATES.items()), "partner", "other", *WAYS)]


def test_without_an_idle_node_only_the_node_itself_is_measured() -> None:
    events = measuring(agent, None)
    assert events == [ev.NodeMeasured("node", tuple(RATES.items()))]


@pytest.mark.parametrize("answer", [dead, unavailable])
def test_a_node_that_cannot_be_measured_is_told_and_its_workers_begin(answer: Callable[..., Any]) -> None:
    (told,) = measuring(answer, agent)
    assert isinstance(told, ev.NodeMeasured)
    assert told.failed
    assert told.rates == ()


def test_connections_are_classed_by_what_nodes_say_of_themselves() -> None:
    def facts(machine: str, domain: str) -> NodeFacts:
        return NodeFacts("box", ("127.0.0.1", 1), "name", domain, machine=machine)

    assert link_class(facts("a", "x"), facts("a", "y")) == "same host"
    assert link_class(facts("a", "x"), facts("b", "x")) == "same zone"
    assert link_class(facts("a", "x"), facts("b", "y")) == "other"
    assert link_class(facts("", ""), facts("", "")) == "other"
