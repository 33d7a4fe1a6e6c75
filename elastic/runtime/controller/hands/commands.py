"""One command for many workers, or one question to many agents: by relays and agents where there are many, to each
itself where there are few.

A worker whose relay or agent does not acknowledge in time is called directly, and may so get a command twice. What it
is sent here has no effect the second time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import ray

from elastic.core.errors import Fenced
from elastic.core.events import Event, WorkerDied
from elastic.runtime.controller.hands.agents import Agents
from elastic.runtime.messages import Command, Handed, Part, Receiver
from elastic.runtime.node.downlink import answer_limit_s
from elastic.runtime.ray_errors import sentence

logger = logging.getLogger(__name__)

# So many calls take 0.05 s. By agents they would take as long, and an agent that is lost or frozen costs its workers
# the limit for its answer.
_FEW = 64

# What the receivers of one node get; by node, what goes by one stop.
_Own = dict[Receiver, tuple[Any, ...]]
_Stop = dict[str, _Own]
# `Workers.reach`, `Workers.call` or `Agents.ask`.
Send = Callable[..., Coroutine[Any, Any, Any]]
# Gets answers by receiver, as they come.
Heard = Callable[[Mapping[Any, Any]], None]


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

    async def ask(self, send: Send, name: str, own: Mapping[str, tuple[Any, ...]], limit_s: float) -> dict[str, Any]:
        """A question to the agents of these nodes, with the arguments of each: their answers. Half of the limit is for
        relays, the rest for those that have not answered by one."""
        answers: dict[str, Any] = {}
        await self.tell(send, name, (), own, limit_s, answers.update, limit_s / 2)
        return answers

    async def tell(
        self,
        send: Send,
        name: str,
        shared: tuple[Any, ...],
        own: Mapping[Any, tuple[Any, ...]],
        retry_s: float,
        heard: Heard | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Command `name` with the arguments `shared`, then the receiver's `own`. Directly it goes by `send`, whose
        errors are raised. Returns once every receiver has answered, or its limit has passed: `retry_s` counts from
        here."""
        self._given = {relay: given for relay, given in self._given.items() if self._agents.at_hand(relay) is given[0]}
        patience_s = self._patience_s if patience_s is None else patience_s
        stops, alone = self._routes(own)
        command, begun = Command(self._incarnation, name, shared, patience_s), time.monotonic()
        # All of them are made before the first limit runs: at 10,000 nodes that takes as long as one.
        calls = {stop: self._call(stop, command, nodes) for stop, nodes in stops.items()}

        def told(answers: Mapping[Any, Any]) -> None:
            if heard is not None:
                heard(answers)

        async def directly(receivers: _Own, limit_s: float) -> None:
            async def one(receiver: Receiver, mine: tuple[Any, ...]) -> None:
                told({receiver: await send(receiver, name, *shared, *mine, retry_s=limit_s)})

            await asyncio.gather(*map(one, receivers, receivers.values()))

        async def by(stop: str) -> None:
            handed = await self._handed(stop, command, stops[stop], calls[stop])
            told(handed.answers)
            left = self._unacknowledged(stop, stops[stop], handed.receivers)
            await directly(left, max(0.0, retry_s - (time.monotonic() - begun)))

        await asyncio.gather(directly(alone, retry_s), *map(by, stops))

    def _routes(self, own: Mapping[Receiver, tuple[Any, ...]]) -> tuple[dict[str, _Stop], _Own]:
        """What goes by which node's agent; and what goes to the receivers themselves."""
        by_node: _Stop = {}
        last: str | None = None
        for receiver, mine in own.items():
            node = receiver if isinstance(receiver, str) else self._node_of(receiver)
            if node != last:
                # Mostly the workers of a node follow each other.
                last, there = node, by_node.setdefault(node, {})
            there[receiver] = mine
        stops: dict[str, _Stop] = {}
        alone: _Own = {}
        few = len(own) <= _FEW
        for node, receivers in by_node.items():
            relay = self._relay_of(node)
            stop = relay if relay is not None and self._agents.at_hand(relay) is not None else node
            if self._agents.at_hand(node) is None or (relay is None and few):
                alone |= receivers
            else:
                stops.setdefault(stop, {})[node] = receivers
        for stop, nodes in list(stops.items()):
            if len(nodes) == 1 and len(next(iter(nodes.values()))) == 1:
                alone |= next(iter(stops.pop(stop).values()))
        return stops, alone

    def _call(self, stop: str, command: Command, nodes: _Stop) -> Awaitable[Handed]:
        """Handles of agents that this relay does not have yet go with it: to read one costs it a subscription."""
        agent: Any = self._agents.at_hand(stop)
        given = self._given.setdefault(stop, (agent, {}))[1]
        others = {node: self._agents.at_hand(node) for node in nodes if node != stop}
        new = {node: other for node, other in others.items() if given.get(node) is not other}
        given.update(new)
        parts = {node: Part(new.get(node), receivers) for node, receivers in nodes.items()}
        handed: Awaitable[Handed] = agent.hand_on.remote(command, parts)
        return handed

    async def _handed(self, stop: str, command: Command, nodes: _Stop, call: Awaitable[Handed]) -> Handed:
        """What has become of it, when the agent of `stop` has answered or has had its time."""
        count, handed = sum(map(len, nodes.values())), Handed({}, {}, {})
        try:
            handed = await asyncio.wait_for(call, answer_limit_s(command.patience_s, count))
        except Fenced as error:
            for receivers in nodes.values():
                handed.refused.update(dict.fromkeys(receivers, sentence(error)))
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.info("node %s has not handed on %s to %d receivers, which are called directly: %s",
                        stop[:8], command.name, count, sentence(error))  # fmt: skip
        for worker, why in handed.died.items():
            self._emit(WorkerDied(worker, why))
        if handed.refused:
            # This process may be unable to reach the journal, which would tell it so.
            receiver, why = next(iter(handed.refused.items()))
            logger.warning("%d receivers refuse %s, %s: %s", len(handed.refused), command.name, receiver, why)
        return handed

    def _unacknowledged(self, stop: str, nodes: _Stop, known: AbstractSet[Receiver]) -> _Own:
        """Those that are to be called directly."""
        left: _Own = {}
        for node, receivers in nodes.items():
            if not known >= receivers.keys():
                # The relay may not have the handle of this node's agent, or one that is of no use.
                self._given.get(stop, (None, {}))[1].pop(node, None)
                left |= {receiver: mine for receiver, mine in receivers.items() if receiver not in known}
        return left
