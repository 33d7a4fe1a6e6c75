"""The controller's connection to an agent: its end tells of a lost node, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.core.run.state import Slot, SlotPhase
from elastic.runtime.controller.senses import agent_links as module
from elastic.runtime.controller.senses.agent_links import AgentLinks

TOKEN = b"t" * 32
LIMIT_S = 20.0
SLOTS = {4: Slot(4, SlotPhase.PLACED, 0.0, "n"), 5: Slot(5, SlotPhase.PLACED, 0.0, "other")}


class Connections:
    """Counts those that are made, when this end has them: the server knows of one before."""

    def __init__(self, connect: Callable[..., Any]) -> None:
        self._connect, self.made = connect, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self._connect(*args, **kwargs)
        self.made += 1
        return channel

    async def first(self) -> None:
        while not self.made:
            await asyncio.sleep(0.01)


@pytest.fixture
def connections() -> Iterator[Connections]:
    with pytest.MonkeyPatch.context() as patch:
        counting = Connections(module.connect)
        patch.setattr(module, "connect", counting)
        yield counting


def test_an_agent_that_ends_is_told_once(connections: Connections) -> None:
    async def story() -> list[int]:
        server, dead = SnapshotServer(TOKEN, "127.0.0.1"), []
        gone = asyncio.Event()
        links = AgentLinks(TOKEN, lambda: SLOTS, lambda lost: (dead.append(lost.slot), gone.set()))
        links.watch("n", server.address)
        await asyncio.wait_for(connections.first(), LIMIT_S)
        assert dead == []
        await asyncio.to_thread(server.close)
        await asyncio.wait_for(gone.wait(), LIMIT_S)
        links.close()
        return dead

    assert asyncio.run(story()) == [4]


def test_what_becomes_of_a_node_that_was_given_back_is_no_news(connections: Connections) -> None:
    async def story() -> list[int]:
        server, dead = SnapshotServer(TOKEN, "127.0.0.1"), []
        slots = dict(SLOTS)
        links = AgentLinks(TOKEN, lambda: slots, lambda lost: dead.append(lost.slot))
        links.watch("n", server.address)
        await asyncio.wait_for(connections.first(), LIMIT_S)
        slots.clear()
        await asyncio.to_thread(server.close)
        await asyncio.wait_for(links._links["n"][1], LIMIT_S)
        return dead

    assert asyncio.run(story()) == []


def test_a_port_that_takes_one_more_connection_while_its_process_dies_is_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heartbeats would know half a second later: a pause that is longer would waste the connection's news."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def closed(channel: Any) -> None:
        pass

    class Channel:
        def close(self) -> None:
            pass

    answers = iter([Channel(), ConnectionResetError(), ConnectionResetError(), ConnectionRefusedError()])

    def connect(*args: Any, **kwargs: Any) -> Any:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def story() -> list[int]:
        dead: list[int] = []
        gone = asyncio.Event()
        links = AgentLinks(TOKEN, lambda: SLOTS, lambda lost: (dead.append(lost.slot), gone.set()))
        monkeypatch.setattr(module, "connect", connect)
        monkeypatch.setattr(module, "_until_closed", closed)
        monkeypatch.setattr(module.asyncio, "sleep", pause)
        links.watch("n", ("127.0.0.1", 1))
        await asyncio.wait_for(gone.wait(), LIMIT_S)
        return dead

    assert asyncio.run(story()) == [4]
    assert pauses == [0.01, 0.02]
