"""The controller's connection to an agent: its end tells of a lost node, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.checkpoint.memory.server.server import MemoryServer
from elastic.runtime.controller.senses import agent_links as module
from elastic.runtime.controller.senses.agent_links import Wires

TOKEN = b"t" * 32
LIMIT_S = 20.0


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
    async def story() -> list[str]:
        server, dead = MemoryServer(TOKEN, "127.0.0.1"), []
        gone = asyncio.Event()
        wires = Wires(TOKEN, lambda node: (dead.append(node), gone.set()))
        wires.watch("n", server.address)
        await asyncio.wait_for(connections.first(), LIMIT_S)
        assert dead == []
        await asyncio.to_thread(server.close)
        await asyncio.wait_for(gone.wait(), LIMIT_S)
        wires.close()
        return dead

    assert asyncio.run(story()) == ["n"]


def test_what_becomes_of_a_node_that_was_given_back_is_no_news(connections: Connections) -> None:
    async def story() -> list[str]:
        server, dead = MemoryServer(TOKEN, "127.0.0.1"), []
        wires = Wires(TOKEN, lambda node: dead.append(node))
        wires.watch("n", server.address)
        await asyncio.wait_for(connections.first(), LIMIT_S)
        task = wires._tasks["n"]
        wires.forget("n")
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(server.close)
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

    async def story() -> list[str]:
        dead: list[str] = []
        gone = asyncio.Event()
        wires = Wires(TOKEN, lambda node: (dead.append(node), gone.set()))
        monkeypatch.setattr(module, "connect", connect)
        monkeypatch.setattr(module, "_until_closed", closed)
        monkeypatch.setattr(module.asyncio, "sleep", pause)
        wires.watch("n", ("127.0.0.1", 1))
        await asyncio.wait_for(gone.wait(), LIMIT_S)
        return dead

    assert asyncio.run(story()) == ["n"]
    assert pauses == [0.01, 0.02]
