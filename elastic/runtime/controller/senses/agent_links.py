"""Sense: one connection from the controller to each node's agent. The kernel closes it when the agent's process ends.

This is the fastest failure detector, and it works without a collective in progress. A broken connection alone does not
prove that the process ended, so the agent's port is tried again at once: only a living kernel's refusal is conclusive.
Every other failure (no answer, no route) is silence, which the heartbeat table judges.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from elastic.core.events import SlotLost
from elastic.core.run.state import Slot
from elastic.transport.channel import Channel
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

_RETRY_LIMIT_S = 0.5
# The kernel closes the sockets of a killed process one after the other: for an instant the connection is broken while
# the port still accepts connections, which are then reset. So the first pause is short, and each pause is twice as long
# as the one before; meanwhile the heartbeats watch the node too.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class AgentLinks:
    """`emit` gets SlotLost for each slot of a node whose agent has ended. `slots` gives the run's slots at present.

    All methods are called on the event loop.
    """

    def __init__(self, token: bytes, slots: Callable[[], Mapping[int, Slot]], emit: Callable[[SlotLost], None]) -> None:
        self._token = token
        self._slots = slots
        self._emit = emit
        self._links: dict[str, tuple[Address, asyncio.Task[None]]] = {}

    def watch(self, node: str, address: Address) -> None:
        """The node's agent listens at `address`. The link ends when the node has no slot of the run any more."""
        known = self._links.get(node)
        if known is not None:
            if known[0] == address and not known[1].done():
                return
            known[1].cancel()
        self._links[node] = address, asyncio.get_running_loop().create_task(self._watch(node, address))

    def close(self) -> None:
        for _, task in self._links.values():
            task.cancel()
        self._links.clear()

    async def _watch(self, node: str, address: Address) -> None:
        connected, pause_s = False, _FIRST_PAUSE_S
        while self._slots_on(node):
            try:
                channel = await asyncio.to_thread(connect, address, self._token, limit_s=_RETRY_LIMIT_S)
            except ConnectionRefusedError:
                if connected:
                    self._gone(node)
                    return
            except OSError as error:
                logger.debug("no link to the agent of node %s: %s", node[:8], error)
            else:
                connected, pause_s = True, _FIRST_PAUSE_S
                try:
                    await _until_closed(channel)
                finally:
                    channel.close()
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _gone(self, node: str) -> None:
        """A node without its agent cannot take part in the run; its workers end themselves."""
        for slot in self._slots_on(node):
            self._emit(SlotLost(slot, f"node {node[:8]} is gone: the process of its agent has ended"))

    def _slots_on(self, node: str) -> list[int]:
        return [slot.id for slot in self._slots().values() if slot.node == node]


async def _until_closed(channel: Channel) -> None:
    """No data is ever sent over a link: when there is something to read, it is the end of the stream."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel.fileno(), closed.set)
    try:
        await closed.wait()
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_reader(channel.fileno())
