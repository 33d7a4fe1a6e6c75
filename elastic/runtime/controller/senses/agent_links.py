"""One connection from the controller to every node's agent: the kernel closes it the moment the agent's process ends.

That is the quickest sign of a lost node, and it needs no collective to be under way. A connection that broke is not yet
a process that is gone, so the agent's port is tried again at once: only a refusal by a kernel that lives proves it.
Whatever else goes wrong (no answer, no route) is silence, which the heartbeats judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from elastic.transport.channel import Channel
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

_AGAIN_LIMIT_S = 0.5
# Of a process that is killed the kernel closes one socket after the other: for an instant the connection is broken and
# the port still takes new ones, which are reset. So the first pause is short; each one is twice as long as the one
# before, as the heartbeats are there meanwhile.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class Wires:
    """`on_dead(node)` is called on the event loop, once per node, when the node's agent is known to be gone."""

    def __init__(self, token: bytes, on_dead: Callable[[str], None]) -> None:
        self._token = token
        self._on_dead = on_dead
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, node: str, address: Address) -> None:
        if node not in self._tasks:
            self._tasks[node] = asyncio.get_running_loop().create_task(self._watch(node, address))

    def forget(self, node: str) -> None:
        """The node is no part of the run any more: what becomes of its agent is no news."""
        task = self._tasks.pop(node, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for node in tuple(self._tasks):
            self.forget(node)

    async def _watch(self, node: str, address: Address) -> None:
        first, pause_s = True, _FIRST_PAUSE_S
        while True:
            try:
                channel = await asyncio.to_thread(connect, address, self._token, limit_s=_AGAIN_LIMIT_S)
            except ConnectionRefusedError:
                if not first:
                    self._tasks.pop(node, None)
                    self._on_dead(node)
                    return
            except OSError as error:
                logger.debug("no wire to node %s: %s", node[:8], error)
            else:
                first, pause_s = False, _FIRST_PAUSE_S
                try:
                    await _until_closed(channel)
                finally:
                    channel.close()
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _until_closed(channel: Channel) -> None:
    """Nothing is ever sent over a wire: when there is something to read, it is its end."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel.fileno(), closed.set)
    try:
        await closed.wait()
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_reader(channel.fileno())
