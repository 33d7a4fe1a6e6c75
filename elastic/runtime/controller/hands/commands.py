"""One command for many workers: by relays and agents where there are many, to each itself where there are few.

A worker whose relay or agent does not acknowledge in time is called directly, and may so get a command twice. What it
is sent here has no effect the second time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import ray

from elastic.core.errors import Fenced
from elastic.core.events import Event, WorkerDied
from elastic.runtime.controller.hands.agents import Agents
from elastic.runtime.messages import Command, Handed, Part
from elastic.runtime.node.downlink import answer_limit_s
from elastic.runtime.ray_errors import sentence

logger = logging.getLogger(__name__)

# So many calls take 0.05 s. By agents they would take as long, and an agent that is lost or frozen costs its workers
# the limit for its answer.
_FEW = 64

# What the workers of one node get, by node, and of one first stop.
_Own = dict[int, tuple[Any, ...]]
_Stop = dict[str, _Own]
# `Workers.reach` or `Workers.call`.
Send = Callable[..., Coroutine[Any, Any, Any]]


class Commands:
    """`node_of` gives a worker's node; `relay_of` the relay of the node's group, which may be itself, or None (see
    `Relays`); `patience_s` see `answer_limit_s`."""

    def __init__(
        self,
        incarnation: int,
        agents: Agents,
        node_of: Callable[[int], str],
        relay_of: Callable[[str], str | None],
        emit: Callable[[Event], None],
        patience_s: float,
    ) -> None:
        self._incarnation = incarnation
        self._agents = agents
        self._node_of = node_of
        self._relay_of = relay_of
        self._emit = emit
        self._patience_s = patience_s
        # By node of a relay: its handle, and the handles of other nodes' agents that it has been given.
        self._given: dict[str, tuple[Any, dict[str, Any]]] = {}

    async def tell(
        self, send: Send, name: str, shared: tuple[Any, ...], own: Mapping[int, tuple[Any, ...]], retry_s: float
    ) -> None:
        """Command `name` with the arguments `shared`, then the worker's `own`. Directly it goes by `send`, whose errors
        are raised. Returns once every worker has answered, or its limit has passed: `retry_s` counts from here."""
        self._given = {relay: given for relay, given in self._given.items() if self._agents.at_hand(relay) is given[0]}
        stops, alone = self._routes(own)
        command, begun = Command(self._incarnation, name, shared), time.monotonic()
        # All of them are made before the first limit runs: at 10,000 nodes that takes as long as one.
        calls = {stop: self._call(stop, command, nodes) for stop, nodes in stops.items()}

        async def directly(workers: _Own, limit_s: float) -> None:
            await asyncio.gather(*(send(w, name, *shared, *mine, retry_s=limit_s) for w, mine in workers.items()))

        async def by(stop: str) -> None:
            left = await self._unacknowledged(stop, name, stops[stop], calls[stop])
            await directly(left, max(0.0, retry_s - (time.monotonic() - begun)))

        await asyncio.gather(directly(alone, retry_s), *map(by, stops))

    def _routes(self, own: Mapping[int, tuple[Any, ...]]) -> tuple[dict[str, _Stop], _Own]:
        """What goes by which node's agent; and what goes to the workers themselves."""
        by_node: _Stop = {}
        for worker, mine in own.items():
            by_node.setdefault(self._node_of(worker), {})[worker] = mine
        stops: dict[str, _Stop] = {}
        alone: _Own = {}
        few = len(own) <= _FEW
        for node, workers in by_node.items():
            relay = self._relay_of(node)
            stop = relay if relay is not None and self._agents.at_hand(relay) is not None else node
            if self._agents.at_hand(node) is None or (relay is None and few):
                alone |= workers
            else:
                stops.setdefault(stop, {})[node] = workers
        for stop, nodes in list(stops.items()):
            if sum(map(len, nodes.values())) == 1:
                alone |= next(iter(stops.pop(stop).values()))
        return stops, alone

    def _call(self, stop: str, command: Command, nodes: _Stop) -> Awaitable[Handed]:
        """Handles of agents that this relay does not have yet go with it: to read one costs it a subscription."""
        agent: Any = self._agents.at_hand(stop)
        given = self._given.setdefault(stop, (agent, {}))[1]
        others = {node: self._agents.at_hand(node) for node in nodes if node != stop}
        new = {node: other for node, other in others.items() if given.get(node) is not other}
        given.update(new)
        parts = {node: Part(new.get(node), workers) for node, workers in nodes.items()}
        handed: Awaitable[Handed] = agent.hand_on.remote(command, parts)
        return handed

    async def _unacknowledged(self, stop: str, name: str, nodes: _Stop, call: Awaitable[Handed]) -> _Own:
        """The workers to be called directly, when the agent of `stop` has answered or has had its time."""
        own = {worker: mine for workers in nodes.values() for worker, mine in workers.items()}
        handed = Handed({}, {}, {})
        try:
            handed = await asyncio.wait_for(call, answer_limit_s(self._patience_s, len(own)))
        except Fenced as error:
            handed.refused.update(dict.fromkeys(own, sentence(error)))
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.info("node %s has not handed on %s to %d workers, which are called directly: %s",
                        stop[:8], name, len(own), sentence(error))  # fmt: skip
        for worker, why in handed.died.items():
            self._emit(WorkerDied(worker, why))
        if handed.refused:
            # This process may be unable to reach the journal, which would tell it so.
            worker, why = next(iter(handed.refused.items()))
            logger.warning("%d workers refuse %s, worker %d: %s", len(handed.refused), name, worker, why)
        known = handed.workers
        for node, workers in nodes.items():
            if not known.issuperset(workers):
                # The relay may not have the handle of this node's agent, or one that is of no use.
                self._given.get(stop, (None, {}))[1].pop(node, None)
        return {worker: mine for worker, mine in own.items() if worker not in known}
