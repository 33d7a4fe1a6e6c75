"""The controller's side of the node agents: starts them on demand, asks them, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.core.settings import RunSettings
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.messages import NodeFacts
from elastic.runtime.node.agent import AgentActor
from elastic.runtime.ray_errors import sentence
from elastic.transport.handshake import Address

logger = logging.getLogger(__name__)

# Each node tries this many others when the connection between two nodes is in doubt: with up to twice as many nodes,
# all pairs are tried.
_TRIED = 32

# Calls at a time: a relay's other nodes each wait for the answer to a beat and to step reports.
_CONCURRENCY = 1000

# An agent's handle, and the facts of its node.
Known = tuple[Any, NodeFacts]
# Gets a node and the address at which its agent listens.
OnAgent = Callable[[str, Address], None]


class Agents:
    """One agent per node of one attempt. `on_agent(node, address)` is called for each agent that has started."""

    def __init__(
        self,
        settings: RunSettings,
        attempt: int,
        incarnation: int,
        controller: Any,
        token: bytes,
        store: StoreThreads,
        on_agent: OnAgent,
    ) -> None:
        self._settings = settings
        self._attempt = attempt
        self._incarnation = incarnation
        self._controller = controller
        self._token = token
        self._store = store
        self._on_agent = on_agent
        self._tasks: dict[str, asyncio.Task[Known]] = {}
        # Made here, and not there yet.
        self._new: set[str] = set()

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    async def of(self, node: str) -> Known:
        """The agent of a node that is part of the run. Raises OSError for any other node."""
        task = self._tasks.get(node)
        if task is None:
            raise ConnectionError(f"node {node[:8]} is not part of the run any more")
        return await asyncio.shield(task)

    async def started(self, node: str) -> Known:
        """As `of`, but starts the agent if it does not exist or if its last start failed."""
        task = self._tasks.get(node)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[node] = asyncio.get_running_loop().create_task(self._start(node))
            self._new.add(node)
            task.add_done_callback(lambda _: self._new.discard(node))
        return await asyncio.shield(task)

    def without_new(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Those of `nodes` that may hold anything: without agents that are starting, which takes a second or more, but
        with those that a restarted controller looks for."""
        return tuple(node for node in nodes if node not in self._new)

    def attach(self, node: str) -> None:
        """Find or start the agent without waiting: its node may be gone."""
        if node not in self._tasks:
            self._tasks[node] = asyncio.get_running_loop().create_task(self._start(node))

    def at_hand(self, node: str) -> Any | None:
        """Its handle; None unless it has started."""
        task = self._tasks.get(node)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()[0]

    def forget(self, node: str) -> None:
        """The agent has died: the next `started` creates a new one."""
        self._tasks.pop(node, None)

    async def forget_if_dead(self, node: str) -> None:
        """After a worker could not be started there. An agent that ends by itself, as when it has not heard the
        controller for its lease, is not noticed while it watches no worker; its memory and its forks end with it."""
        agent = self.at_hand(node)
        if agent is None:
            return
        try:
            await asyncio.wait_for(agent.reach.remote({}), self._settings.failures.survey_timeout_s)
        except ray.exceptions.RayActorError as error:
            if not isinstance(error, ray.exceptions.ActorUnavailableError) and self.at_hand(node) is agent:
                logger.warning("the agent of node %s has ended: %s", node[:8], sentence(error))
                self.forget(node)
        except (ray.exceptions.RayError, asyncio.TimeoutError, OSError):
            # Silence is judged by the heartbeat table.
            pass

    def drop(self, node: str) -> None:
        """The node is released: end its agent."""
        agent, task = self.at_hand(node), self._tasks.pop(node, None)
        if agent is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(agent, no_restart=True)
        elif task is not None:
            task.cancel()

    def close(self) -> None:
        for node in self.nodes:
            self.drop(node)

    async def ask(self, node: str, name: str, *args: Any, retry_s: float) -> Any:
        """A question of `AgentActor.asked`. Its answer; None, where there is none within `retry_s`; an OSError, which
        says why there will be none."""
        try:
            return await asyncio.wait_for(self._ask(node, name, *args), retry_s)
        except (ray.exceptions.RayError, asyncio.TimeoutError, OSError) as error:
            logger.warning("node %s has not answered %s: %s", node[:8], name, error or type(error).__name__)
            return None if isinstance(error, asyncio.TimeoutError) else ConnectionError(sentence(error))

    async def _ask(self, node: str, name: str, *args: Any) -> Any:
        agent, _ = await self.of(node)
        return await agent.asked.remote(self._incarnation, name, *args)

    async def unreachable(self, nodes: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Pairs (node, unreachable node). Each node tries its successors in a ring. A node that does not answer is
        silent, which the heartbeat table judges."""
        asked = []
        for place, node in enumerate(nodes):
            following = [nodes[(place + step) % len(nodes)] for step in range(1, min(len(nodes), _TRIED + 1))]
            asked.append(self._tries(node, [other for other in following if other != node]))
        return tuple(pair for pairs in await asyncio.gather(*asked) for pair in pairs)

    async def _tries(self, node: str, others: Sequence[str]) -> list[tuple[str, str]]:
        try:
            agent, _ = await self.of(node)
            known = {other: (await self.of(other))[1].memory for other in others}
            limit_s = self._settings.failures.survey_timeout_s * 0.8
            return [(node, other) for other in await asyncio.wait_for(agent.reach.remote(known), limit_s)]
        except (ray.exceptions.RayError, asyncio.TimeoutError, OSError) as error:
            logger.warning(
                "node %s did not report which nodes it can reach: %s", node[:8], error or type(error).__name__
            )
            return []

    async def _start(self, node: str) -> Known:
        options = {
            "name": names.agent(self._settings.run_id, self._attempt, node),
            "namespace": names.NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
            "max_concurrency": _CONCURRENCY,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor_class: Any = ray.remote(AgentActor)
        arguments = (node, self._settings, self._controller, self._token)
        agent = await self._store.call(lambda: actor_class.options(**options).remote(*arguments))
        facts = await agent.join.remote()
        self._on_agent(node, facts.memory)
        return agent, facts
