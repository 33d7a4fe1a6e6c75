"""The way to the controller by another node's agent: what goes by it, and what happens where it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray

from elastic.core.data.joined_reports import joined_by_step
from elastic.core.data.steps import StepReport
from elastic.core.settings import FailureSettings
from elastic.runtime.messages import Beat, BeatReply, Item, NodeReply, NodeReports, Post, QuietNodes, Reply
from elastic.runtime.node import uplink
from elastic.runtime.node.uplink import WITHOUT_RELAY_S, Uplink

# Nobody runs into a limit, but for who is to.
PATIENT, SHORT = FailureSettings(heartbeat_s=0.02, suspect_after_s=1e6), FailureSettings(suspect_after_s=0.1)


class Handle:
    """As an actor's: a call of `target` is begun, and its answer awaited."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(remote=getattr(self._target, name))


class Controller:
    """Names `relay` to every node but those in `own`; takes reports of those that know incarnation 5."""

    def __init__(self) -> None:
        self.relay: Any = None
        self.beats: list[str] = []
        self.quieted: list[QuietNodes] = []
        self.reported: list[NodeReports] = []
        self.released: tuple[str, ...] = ()
        self.away = False
        self.posts: list[dict[int, Post]] = []

    async def beat(self, beat: Beat) -> BeatReply:
        self.beats.append(beat.node)
        return BeatReply(beat.node not in self.released, self.relay)

    async def quiet(self, beats: QuietNodes) -> tuple[str, ...]:
        self.quieted.append(beats)
        if self.away:
            raise ray.exceptions.RayError("it restarts")
        return self.released

    async def node_reports(self, reports: NodeReports) -> NodeReply | None:
        self.reported.append(reports)
        return NodeReply(5, tuple(10 + worker for worker in reports.workers)) if reports.heard == 5 else None

    async def deliver_all(self, posts: dict[int, Post]) -> dict[int, Reply]:
        self.posts.append(posts)
        if self.away:
            raise ray.exceptions.RayError("it restarts")
        return {worker: Reply(5, durable=10 + worker) for worker in posts}


class Frozen:
    async def pass_quiet(self, node: str, workers: tuple[int, ...]) -> bool:
        await asyncio.Event().wait()
        raise AssertionError

    async def pass_posts(self, posts: dict[int, Post]) -> dict[int, Reply]:
        await asyncio.Event().wait()
        raise AssertionError


class Gone:
    async def pass_posts(self, posts: dict[int, Post]) -> dict[int, Reply]:
        raise ray.exceptions.RayActorError

    async def pass_quiet(self, node: str, workers: tuple[int, ...]) -> bool:
        raise ray.exceptions.RayActorError


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "_REPORTS_LIMIT_S", 1e6)


def uplinks(
    controller: Controller, count: int, clock: Callable[[], float] = lambda: 0.0, limits: FailureSettings = PATIENT
) -> list[Uplink]:
    return [Uplink(Handle(controller), limits, clock) for _ in range(count)]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def reports(node: int, heard: int = 5, step: int = 7) -> NodeReports:
    """Of two workers of a node, which are its ranks."""
    ranks = (2 * node, 2 * node + 1)
    steps = joined_by_step(StepReport(step, 0.5, ((r, r + 1),), 1, 0.1, generation=1, rank=r) for r in ranks)
    return NodeReports((f"n{node}",), ranks, heard, steps)


def test_quiet_beats_go_by_the_relay_and_others_to_the_controller_itself() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay, *leaves = uplinks(controller, 3)
        controller.relay = Handle(relay)
        for number, leaf in enumerate(leaves):
            assert await leaf.beat(Beat(f"n{number}", {number: 0.0}))
        assert controller.beats == ["n0", "n1"], "the first beat asks who the relay is"
        controller.released = ("n1",)
        quiet = [leaf.beat(Beat(f"n{number}", {number: 0.0})) for number, leaf in enumerate(leaves)]
        assert await asyncio.gather(*quiet) == [True, False]
        assert controller.quieted == [QuietNodes(("n0", "n1"), ((0,), (1,)))]
        assert relay.passed_on == 2
        await leaves[0].beat(Beat("n0", {0: 0.3}))
        await leaves[0].beat(Beat("n0", {0: 0.0}, {1: "it has ended"}))
        assert controller.beats[2:] == ["n0", "n0"], "silence and ends are urgent"

    run(scenario)


@pytest.mark.parametrize("relay", [Frozen(), Gone()])
def test_a_relay_that_does_not_answer_is_left_for_a_while(relay: Any) -> None:
    async def scenario() -> None:
        now = 0.0
        controller = Controller()
        [leaf] = uplinks(controller, 1, lambda: now, SHORT)
        controller.relay = Handle(relay)
        for _ in range(3):
            assert await leaf.beat(Beat("n0", {0: 0.0}))
        assert controller.beats == ["n0"] * 3
        [controller.relay] = map(Handle, uplinks(controller, 1))
        await leaf.beat(Beat("n0", {0: 0.0}))
        assert not controller.quieted
        now = WITHOUT_RELAY_S
        # On a busy machine this relay's answer may come too late as well: it was asked.
        await leaf.beat(Beat("n0", {0: 0.0}))
        assert len(controller.quieted) == 1

    run(scenario)


def test_a_relay_that_the_controller_does_not_answer_is_no_reason_to_leave_it() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay, leaf = uplinks(controller, 2)
        controller.relay = Handle(relay)
        await leaf.beat(Beat("n0", {0: 0.0}))
        controller.away = True
        assert await leaf.beat(Beat("n0", {0: 0.0})), "by itself"
        controller.away = False
        assert await leaf.beat(Beat("n0", {0: 0.0}))
        assert (len(controller.quieted), len(controller.beats)) == (2, 2)

    run(scenario)


def test_reports_of_several_nodes_are_one_message_and_each_gets_its_part_of_the_answer() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay, *leaves = uplinks(controller, 4)
        controller.relay = Handle(relay)
        for number, leaf in enumerate(leaves):
            await leaf.beat(Beat(f"n{number}", {}))
        sent = [leaf.reports(reports(number)) for number, leaf in enumerate(leaves[:2])]
        assert await asyncio.gather(*sent) == [NodeReply(5, (10, 11)), NodeReply(5, (12, 13))]
        [message] = controller.reported
        assert (message.nodes, message.workers) == (("n0", "n1"), (0, 1, 2, 3))
        assert [(part.step, part.ranks, part.positions) for part in message.steps] == [(7, (0, 1, 2, 3), ((0, 4),))]

        controller.reported.clear()
        old = [leaves[0].reports(reports(0, heard=4)), leaves[1].reports(reports(1))]
        assert await asyncio.gather(*old) == [None, NodeReply(5, (12, 13))]
        assert [(m.nodes, m.heard) for m in controller.reported] == [(("n1",), 5), (("n0",), 4)]

    run(scenario)


def posts(node: int, limit_s: float = 3.0) -> dict[int, Post]:
    """Of two workers of a node, of which the second has so little time."""
    first, second = 2 * node, 2 * node + 1
    return {first: Post(5, [Item("event", first)]), second: Post(5, [Item("event", second)], limit_s)}


def replies(node: int) -> dict[int, Reply]:
    return {worker: Reply(5, durable=10 + worker) for worker in posts(node)}


def test_what_workers_of_several_nodes_say_is_one_message_and_each_gets_its_answer() -> None:
    async def scenario() -> None:
        controller = Controller()
        relay, *leaves = uplinks(controller, 3)
        controller.relay = Handle(relay)
        for number, leaf in enumerate(leaves):
            assert await leaf.posts(posts(number)) == replies(number), "by itself: no relay has been named"
            await leaf.beat(Beat(f"n{number}", {}))
        assert controller.posts == [posts(0), posts(1)]
        sent = [leaf.posts(posts(number)) for number, leaf in enumerate(leaves)]
        assert await asyncio.gather(*sent) == [replies(0), replies(1)]
        assert controller.posts[2:] == [{**posts(0), **posts(1)}]

    run(scenario)


@pytest.mark.parametrize("relay", [Frozen(), Gone()])
def test_what_a_relay_does_not_pass_on_is_said_to_the_controller(relay: Any) -> None:
    async def scenario() -> None:
        controller = Controller()
        [leaf] = uplinks(controller, 1)
        controller.relay = Handle(relay)
        await leaf.beat(Beat("n0", {}))
        for _ in range(2):
            assert await leaf.posts(posts(0, 1.0)) == replies(0)
        assert uplink._half_limit_s(posts(0, 1.0)) == 0.4, "the second one's agent has 0.8 s, and so long its relay"
        assert controller.posts == [posts(0, 1.0)] * 2
        controller.away = True
        with pytest.raises(ConnectionError):
            await leaf.posts(posts(0))

    run(scenario)


def test_a_relay_without_the_controller_s_answer_says_so() -> None:
    async def scenario() -> None:
        controller = Controller()
        controller.away = True
        [relay] = uplinks(controller, 1)
        assert await relay.pass_posts(posts(0)) is None

    run(scenario)
