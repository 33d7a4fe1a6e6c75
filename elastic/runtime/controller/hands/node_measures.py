"""Has nodes that join measured, before their workers begin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray

from elastic.core.actions import MeasureNode
from elastic.core.errors import ElasticError
from elastic.core.events import NodeMeasured
from elastic.core.policy.calibration import HOST, OTHER, ZONE
from elastic.runtime.controller.hands.agents import Agents
from elastic.runtime.messages import NodeFacts

logger = logging.getLogger(__name__)

# Two seconds of work where nothing else runs. A node that takes longer is used unmeasured, and that is reported.
_LIMIT_S = 30.0
_TROUBLE = (ray.exceptions.RayError, asyncio.TimeoutError, OSError, ElasticError, ValueError)


class NodeMeasures:
    """Call `measure` when a node has joined; `ended` of it waits for the end of that, whatever it was."""

    def __init__(self, agents: Agents, emit: Callable[[NodeMeasured], None]) -> None:
        self._agents = agents
        self._emit = emit
        self._open: dict[str, asyncio.Event] = {}

    def measure(self, action: MeasureNode) -> Coroutine[Any, Any, None]:
        self._open[action.node] = asyncio.Event()
        return self._measure(action)

    async def ended(self, node: str) -> None:
        """At once for a node that is not being measured."""
        if node in self._open:
            await self._open[node].wait()

    async def _measure(self, action: MeasureNode) -> None:
        try:
            found = await asyncio.wait_for(self._asked(action), _LIMIT_S)
        except _TROUBLE as error:
            found = NodeMeasured(action.node, failed=str(error) or f"no answer within {_LIMIT_S:.0f} s")
        finally:
            self._open.pop(action.node).set()
        self._emit(found)

    async def _asked(self, action: MeasureNode) -> NodeMeasured:
        agent, facts = await self._agents.started(action.node)
        rates = tuple((await agent.measure.remote()).items())
        partner, link, ways = await self._link(agent, facts, action.partners)
        return NodeMeasured(action.node, rates, partner, link, *ways)

    async def _link(self, agent: Any, facts: NodeFacts, partners: Sequence[str]) -> tuple[str, str, tuple[Any, Any]]:
        """With the first partner that answers."""
        for partner in partners:
            try:
                _, other = await self._agents.of(partner)
                return partner, link_class(facts, other), await agent.measure_link.remote(other.memory)
            except _TROUBLE as error:
                logger.warning("the connection to node %s was not measured: %s", partner[:8], error)
        return "", "", ((), ())


def link_class(one: NodeFacts, other: NodeFacts) -> str:
    """By what both nodes say of themselves: the running kernel, then the label of the failure domain."""
    if one.machine and one.machine == other.machine:
        return HOST
    return ZONE if one.domain and one.domain == other.domain else OTHER
