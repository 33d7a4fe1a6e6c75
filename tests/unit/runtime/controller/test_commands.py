"""A command for many workers: who is called by whom, and what happens where one on the way does not hand it on.

The agents' part is the real one; actors and their handles are plain objects.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from elastic.core.errors import Fenced
from elastic.core.events import Event, WorkerDied
from elastic.runtime.controller.hands.commands import Commands
from elastic.runtime.messages import Command, Handed, Part
from elastic.runtime.node.downlink import Downlink

LIMIT_S = 20.0
# Only what never answers is to run into it.
PATIENT_S, SHORT_S = 1e6, 0.5


class Worker:
    """Obeys the newest controller, as a real one does."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.newest = 0
        self.told: list[tuple[Any, ...]] = []
        self.fault: Exception | None = None

    async def command(self, incarnation: int, *command: Any) -> Any:
        if incarnation < self.newest:
            raise Fenced(f"controller {incarnation} was replaced")
        if self.fault is not None:
            raise self.fault
        self.told.append(command)
        return self.number


class Agent:
    """A node's agent as far as commands go by it. `away` stands for what its process does in place of answering."""

    def __init__(self, node: str) -> None:
        self.newest = 0
        self.downlink = Downlink(node, self.heed, self.answer)
        self.away: Callable[[], Awaitable[None]] | None = None
        self.given: list[str] = []

    async def answer(self, *question: Any) -> Any:
        return self.downlink._node, *question

    def heed(self, incarnation: int) -> None:
        if incarnation < self.newest:
            raise Fenced(f"controller {incarnation} was replaced: this node obeys controller {self.newest}")
        self.newest = incarnation

    async def hand_on(self, command: Command, parts: dict[str, Part]) -> Handed:
        if self.away is not None:
            await self.away()
        self.given += [node for node, part in parts.items() if part.agent is not None]
        return await self.downlink.hand_on(command, parts)


async def frozen() -> None:
    await asyncio.Event().wait()


async def gone() -> None:
    raise ray.exceptions.ActorDiedError


def handle_of(hand_on: Any) -> Any:
    return SimpleNamespace(hand_on=SimpleNamespace(remote=hand_on))


class Cluster:
    """Nodes `n0`, `n1`... in groups of `per_relay` with the first one as relay (0: none have one); worker w is on node
    w // ranks. `calls` counts those that the controller makes."""

    def __init__(self, nodes: int, ranks: int, per_relay: int, patience_s: float = PATIENT_S) -> None:
        self.names = [f"n{number}" for number in range(nodes)]
        self.workers = {number: Worker(number) for number in range(nodes * ranks)}
        self.agents = {name: Agent(name) for name in self.names}
        self.calls: Counter[str] = Counter()
        self.direct: set[int] = set()
        self.events: list[Event] = []
        self.answers: dict[Any, Any] = {}
        self.handles = {name: self._counted(name, agent) for name, agent in self.agents.items()}
        for number, worker in self.workers.items():
            remote = SimpleNamespace(handed=SimpleNamespace(remote=worker.command))
            self.agents[f"n{number // ranks}"].downlink.workers[number] = remote
        self.commands = Commands(
            1, SimpleNamespace(at_hand=self.handles.get),  # type: ignore[arg-type]
            lambda worker: f"n{worker // ranks}",
            lambda node: f"n{int(node[1:]) // per_relay * per_relay}" if per_relay else None,
            self.events.append, patience_s,
        )  # fmt: skip

    def _counted(self, name: str, agent: Agent) -> Any:
        def called(command: Command, parts: dict[str, Part]) -> Awaitable[Handed]:
            self.calls[name] += 1
            # A handle that another process has been sent is another object, and calls by it are not the controller's.
            sent = {
                node: part if part.agent is None else part._replace(agent=handle_of(self.agents[node].hand_on))
                for node, part in parts.items()
            }
            return agent.hand_on(command, sent)

        return handle_of(called)

    async def send(self, worker: int, name: str, *arguments: Any, retry_s: float) -> Any:
        self.direct.add(worker)
        return await self.workers[worker].command(1, name, *arguments)

    def tell(self) -> None:
        own = {number: (number, "own") for number in self.workers}
        telling = self.commands.tell(self.send, "begin", ("shared",), own, 2.0, self.answers.update)
        asyncio.run(asyncio.wait_for(telling, LIMIT_S))

    def ask(self, limit_s: float = PATIENT_S) -> dict[str, Any]:
        async def alone(node: str, *question: Any, retry_s: float) -> Any:
            assert 0 < retry_s <= limit_s
            self.asked.append(node)
            return await self.agents[node].answer(*question) if self.agents[node].away is None else None

        self.asked: list[str] = []
        own = {name: (number,) for number, name in enumerate(self.names)}
        return asyncio.run(asyncio.wait_for(self.commands.ask(alone, "held", own, limit_s), LIMIT_S))

    def assert_all_told(self, times: int = 1) -> None:
        told = {number: worker.told for number, worker in self.workers.items()}
        assert told == {number: [("begin", "shared", number, "own")] * times for number in self.workers}
        assert self.answers == {number: number for number in self.workers}


def test_the_controller_calls_one_agent_of_a_hundred() -> None:
    cluster = Cluster(400, 8, per_relay=100)
    cluster.tell()
    assert cluster.calls == {"n0": 1, "n100": 1, "n200": 1, "n300": 1}
    assert cluster.direct == set()
    cluster.assert_all_told()


def test_without_relays_it_calls_one_agent_for_all_workers_of_a_node() -> None:
    cluster = Cluster(20, 8, per_relay=0)
    cluster.tell()
    assert cluster.calls == dict.fromkeys(cluster.names, 1)
    assert cluster.direct == set()
    cluster.assert_all_told()


@pytest.mark.parametrize(("nodes", "ranks", "per_relay"), [(8, 8, 0), (100, 1, 0), (5, 1, 1)])
def test_it_calls_workers_itself_where_nobody_else_could_spare_it_calls(nodes: int, ranks: int, per_relay: int) -> None:
    """Few of them, or one on each node."""
    cluster = Cluster(nodes, ranks, per_relay)
    cluster.tell()
    assert not cluster.calls
    assert cluster.direct == set(cluster.workers)
    cluster.assert_all_told()


@pytest.mark.parametrize(("nodes", "per_relay", "calls"), [(400, 100, 4), (100, 0, 0), (64, 100, 1), (3, 0, 0)])
def test_a_question_goes_to_one_agent_of_a_hundred_and_each_answers(nodes: int, per_relay: int, calls: int) -> None:
    """Without relays each is asked itself."""
    cluster = Cluster(nodes, 1, per_relay)
    assert cluster.ask() == {name: (name, "held", number) for number, name in enumerate(cluster.names)}
    assert cluster.calls.total() == calls
    assert cluster.asked == ([] if calls else cluster.names)


@pytest.mark.parametrize("away", [gone, frozen])
@pytest.mark.parametrize(("struck", "behind"), [("n1", {"n1"}), ("n2", {"n2", "n3"})])
def test_nodes_behind_a_relay_that_does_not_answer_are_asked_themselves(
    away: Any, struck: str, behind: set[str]
) -> None:
    """`n2` is a relay, and has no answer of its own."""
    cluster = Cluster(6, 1, per_relay=2)
    cluster.agents[struck].away = away
    answers = cluster.ask(2.0 if away is frozen else PATIENT_S)
    assert set(cluster.asked) >= behind if away is frozen else set(cluster.asked) == behind
    assert answers.pop(struck) is None
    assert answers == {name: (name, "held", n) for n, name in enumerate(cluster.names) if name != struck}


@pytest.mark.parametrize("away", [gone, frozen])
@pytest.mark.parametrize(("struck", "nodes"), [("n1", {"n1"}), ("n2", {"n2", "n3"})])
def test_who_is_behind_an_agent_that_does_not_hand_on_is_called(away: Any, struck: str, nodes: set[str]) -> None:
    """`n2` is a relay. On a busy machine an answer of the others may be late as well."""
    cluster = Cluster(6, 2, per_relay=2, patience_s=SHORT_S if away is frozen else PATIENT_S)
    cluster.agents[struck].away = away
    cluster.tell()
    behind = {worker for worker in cluster.workers if f"n{worker // 2}" in nodes}
    assert cluster.direct >= behind if away is frozen else cluster.direct == behind
    assert all(worker.told for worker in cluster.workers.values())
    assert cluster.events == []


def test_a_command_that_was_handed_on_before_the_agent_was_lost_comes_twice() -> None:
    """Killed between its workers' acknowledgements and its own."""
    cluster = Cluster(4, 2, per_relay=2)
    struck = cluster.agents["n0"]

    async def handed_on_and_lost(command: Command, parts: dict[str, Part]) -> Handed:
        await struck.downlink.hand_on(command, parts)
        raise ray.exceptions.ActorDiedError

    cluster.handles["n0"].hand_on.remote = handed_on_and_lost
    cluster.tell()
    assert cluster.direct == {0, 1, 2, 3}
    assert [len(worker.told) for worker in cluster.workers.values()] == [2] * 4 + [1] * 4


def test_a_worker_that_its_agent_does_not_know_or_reach_is_called() -> None:
    cluster = Cluster(4, 2, per_relay=2)
    del cluster.agents["n1"].downlink.workers[3]
    unreachable = SimpleNamespace(handed=SimpleNamespace(remote=frozen_connection))
    cluster.agents["n2"].downlink.workers[4] = unreachable
    cluster.tell()
    assert cluster.direct == {3, 4}
    cluster.assert_all_told()


async def frozen_connection(*_: Any) -> None:
    raise ray.exceptions.ActorUnavailableError("connection reset", None)


def test_a_worker_that_has_died_is_reported_and_not_called() -> None:
    cluster = Cluster(4, 2, per_relay=2)
    cluster.workers[3].fault = ray.exceptions.ActorDiedError()
    cluster.tell()
    (died,) = cluster.events
    assert isinstance(died, WorkerDied)
    assert (died.worker, cluster.direct) == (3, set())


@pytest.mark.parametrize("stop", ["a relay", "an agent", "a worker"])
def test_a_command_of_a_controller_that_was_replaced_ends_where_the_newer_one_is_known(
    stop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that was held on its way: each stop looks when it hands it on."""
    cluster = Cluster(4, 2, per_relay=2)
    if stop == "a worker":
        cluster.workers[3].newest = 2
    else:
        cluster.agents["n0" if stop == "a relay" else "n1"].newest = 2
    cluster.tell()
    refusing = {"a relay": {0, 1, 2, 3}, "an agent": {2, 3}, "a worker": {3}}[stop]
    assert {number for number, worker in cluster.workers.items() if not worker.told} == refusing
    assert cluster.direct == set()
    assert f"{len(refusing)} receivers refuse begin, {min(refusing)}: " in caplog.text
    assert "was replaced" in caplog.text


def test_a_message_that_a_relay_holds_while_the_controller_is_replaced_goes_no_further() -> None:
    cluster = Cluster(2, 2, per_relay=2)
    relay = cluster.agents["n0"]

    async def thaws_later() -> None:
        # Its successor's command overtakes it.
        await cluster.agents["n0"].downlink.hand_on(
            Command(2, "end", (3, "over"), PATIENT_S), {"n0": Part(None, {0: (), 1: ()})}
        )

    relay.away = thaws_later
    cluster.tell()
    assert [worker.told for worker in cluster.workers.values()] == [[("end", 3, "over")]] * 2 + [[]] * 2
    assert cluster.direct == set()


def test_a_relay_is_given_the_other_agents_once() -> None:
    cluster = Cluster(4, 2, per_relay=2)
    for _ in range(2):
        cluster.tell()
    assert [cluster.agents[name].given for name in cluster.names] == [["n1"], [], ["n3"], []]
    # Another process on that node; and one that has been given nothing, or has had no use of it.
    cluster.handles["n1"] = cluster._counted("n1", cluster.agents["n1"])
    cluster.handles["n2"] = cluster._counted("n2", cluster.agents["n2"])
    cluster.tell()
    assert [cluster.agents[name].given for name in cluster.names] == [["n1"] * 2, [], ["n3"] * 2, []]
    cluster.assert_all_told(3)
    cluster.agents["n1"].away = gone
    cluster.tell()
    cluster.agents["n1"].away = None
    cluster.tell()
    assert [cluster.agents[name].given for name in cluster.names] == [["n1"] * 3, [], ["n3"] * 2, []]
    assert cluster.direct == {2, 3}, "the first time"
    cluster.assert_all_told(5)


def test_a_relay_that_is_lost_costs_its_nodes_a_call_each() -> None:
    cluster = Cluster(6, 2, per_relay=3)
    del cluster.handles["n0"]
    cluster.tell()
    assert cluster.calls == {"n1": 1, "n2": 1, "n3": 1}
    assert cluster.direct == {0, 1}, "nor has its node an agent"
    cluster.assert_all_told()


def test_a_worker_that_can_be_reached_by_nobody_is_an_error() -> None:
    cluster = Cluster(4, 2, per_relay=2)
    cluster.agents["n1"].away = gone
    cluster.workers[3].fault = ConnectionError("worker 3 cannot be reached")
    with pytest.raises(ConnectionError, match="worker 3"):
        cluster.tell()
