"""The controller's connection to an agent: its end tells of a lost node, and nothing else does."""

from __future__ import annotations

import asyncio

from elastic.checkpoint.memory.server import MemoryServer
from elastic.runtime.wires import Wires

TOKEN = b"t" * 32
LIMIT_S = 20.0


async def _connected(server: MemoryServer) -> None:
    while not server.stats()["connections"]:
        await asyncio.sleep(0.01)


def test_an_agent_that_ends_is_told_once() -> None:
    async def story() -> list[str]:
        server, dead = MemoryServer(TOKEN, "127.0.0.1"), []
        gone = asyncio.Event()
        wires = Wires(TOKEN, lambda node: (dead.append(node), gone.set()))
        wires.watch("n", server.address)
        await asyncio.wait_for(_connected(server), LIMIT_S)
        assert dead == []
        await asyncio.to_thread(server.close)
        await asyncio.wait_for(gone.wait(), LIMIT_S)
        wires.close()
        return dead

    assert asyncio.run(story()) == ["n"]


def test_what_becomes_of_a_node_that_was_given_back_is_no_news() -> None:
    async def story() -> list[str]:
        server, dead = MemoryServer(TOKEN, "127.0.0.1"), []
        wires = Wires(TOKEN, lambda node: dead.append(node))
        wires.watch("n", server.address)
        await asyncio.wait_for(_connected(server), LIMIT_S)
        task = wires._tasks["n"]
        wires.forget("n")
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(server.close)
        return dead

    assert asyncio.run(story()) == []
