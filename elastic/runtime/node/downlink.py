"""The way from the controller to the workers of many nodes, and to the nodes' agents: by relays, and by the agents.

A call of an actor takes the controller the better part of a millisecond, whoever answers: 80,000 workers are a minute.
So one relay is given the commands for about a hundred nodes, and one agent those for the workers of its node. Nothing
is kept here for anybody: the controller calls each worker that has not acknowledged its command in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import ray

from elastic.core.errors import Fenced
from elastic.runtime.messages import Command, Handed, Part, Receiver
from elastic.runtime.ray_errors import sentence

# What of the limit for the answer a relay has for its agents, and an agent for its workers: one that is late costs
# nobody else's acknowledgement.
_OF_RELAY, _OF_AGENT = 0.8, 0.6
# What an agent's or a worker's call takes one that hands on.
_EACH_S = 0.001


def answer_limit_s(patience_s: float, receivers: int) -> float:
    """For a stop with so many receivers behind it. In `patience_s` a living process answers a command
    (`probe_timeout_s`), or has had its time for a question."""
    return patience_s + _EACH_S * receivers


class Downlink:
    """Of one node's agent. `heed` raises Fenced for a controller that was replaced; `itself` answers what is asked of
    the agent. Workers and agents are actor handles, or what has their methods."""

    def __init__(self, node: str, heed: Callable[[int], None], itself: Callable[..., Awaitable[Any]]) -> None:
        self._node = node
        self._heed = heed
        self._itself = itself
        # Of this node, by number; and of the nodes that have it as relay.
        self.workers: dict[int, Any] = {}
        self._agents: dict[str, Any] = {}
        # How many commands this node's workers have acknowledged here, and other nodes' workers to their agents; and
        # how many questions these agents have answered.
        self.handed_on = self.passed_down = self.answered = 0

    async def hand_on(self, command: Command, parts: Mapping[str, Part]) -> Handed:
        """To the workers of this node, or to itself, and to the agents of the others. Returns once all have answered,
        or are late.

        Raises Fenced.
        """
        self._heed(command.incarnation)
        handed = Handed({}, {}, {})
        self._agents.update({node: part.agent for node, part in parts.items() if part.agent is not None})
        own = parts.get(self._node)
        work = [] if own is None else [self._to_own(command, own, handed)]
        work += [self._to_agent(command, node, part, handed) for node, part in parts.items() if node != self._node]
        behind = sum(len(part.own) for part in parts.values())
        await _within(_OF_RELAY * answer_limit_s(command.patience_s, behind), work)
        return handed

    async def _to_own(self, command: Command, part: Part, handed: Handed) -> None:
        told = [self._to_one(command, receiver, own, handed) for receiver, own in part.own.items()]
        await _within(_OF_AGENT * answer_limit_s(command.patience_s, len(told)), told)

    async def _to_one(self, command: Command, receiver: Receiver, own: tuple[Any, ...], handed: Handed) -> None:
        if isinstance(receiver, str):
            handed.answers[receiver] = await self._itself(command.name, *command.shared, *own)
            return
        handle = self.workers.get(receiver)
        if handle is None:
            return
        try:
            answer = await handle.handed.remote(command.incarnation, command.name, *command.shared, *own)
        except Fenced as error:
            handed.refused[receiver] = sentence(error)
        except ray.exceptions.ActorDiedError as error:
            handed.died[receiver] = sentence(error)
        except ray.exceptions.RayError:
            # The controller calls the worker itself, and finds out why.
            return
        else:
            handed.answers[receiver] = answer
            self.handed_on += 1

    async def _to_agent(self, command: Command, node: str, part: Part, handed: Handed) -> None:
        agent = self._agents.get(node)
        if agent is None:
            return
        try:
            found: Handed = await agent.hand_on.remote(command, {node: Part(None, part.own)})
        except Fenced as error:
            handed.refused.update(dict.fromkeys(part.own, sentence(error)))
        except ray.exceptions.RayError:
            self._agents.pop(node, None)
        else:
            handed.add(found)
            if node in found.answers:
                self.answered += 1
            else:
                self.passed_down += len(found.answers)


async def _within(limit_s: float, work: Iterable[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(one) for one in work]
    if tasks:
        late = (await asyncio.wait(tasks, timeout=limit_s))[1]
        for task in late:
            task.cancel()
