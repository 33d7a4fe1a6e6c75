"""Sends a worker's messages to the controller: step reports through its node's agent, where there are many workers what
starts a generation as well, and everything else itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from elastic.core.events import GroupJoined, TrainingReached
from elastic.runtime.messages import Item, Post, Reply

logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
# An agent answers within its own limit for the controller. One that does not is frozen, and its node is suspected
# earlier: what the controller hears of this worker must not wait for it again soon.
AGENT_LIMIT_S, _WITHOUT_AGENT_S = 1.0, 30.0
# More than the agent gives the controller (`node.uplink`). Within it a probe is answered, and a start has longer.
_POST_LIMIT_S = 3.0
# What every worker of a generation says when it starts.
_OF_A_START = frozenset(event.__name__ for event in (GroupJoined, TrainingReached))
_KINDS_OF_A_START = frozenset(("restored", "moved", "step"))


class Delivery:
    """Called by the outbox, on its thread. Raises what Ray raises where the controller cannot be reached.

    `many`: there are many workers. What all of them say when a generation starts then goes through the agent too.
    """

    def __init__(self, worker: int, controller: Any) -> None:
        self._worker = worker
        self._controller = controller
        self._agent: Any = None
        self._not_before = 0.0
        self.many = False

    def through(self, agent: Any) -> None:
        """Step reports go to this agent, which joins them with those of the node's other workers."""
        self._agent = agent

    def __call__(self, items: Sequence[Item], heard: int | None) -> Reply:
        if self._agent is not None and heard is not None and time.monotonic() >= self._not_before:
            reply = self._joined(items, heard)
            if reply is not None:
                return reply
        call = self._controller.deliver.remote(self._worker, list(items), heard)
        answered: Reply = ray.get(call, timeout=_LIMIT_S)
        return answered

    def _joined(self, items: Sequence[Item], heard: int) -> Reply | None:
        """Nothing urgent may wait for other workers, unless all of them say it, and each would wait for all calls."""
        if all(item.kind == "step" and (self.many or not item.urgent) for item in items):
            return self._by_agent("relay", AGENT_LIMIT_S, heard, [item.data for item in items])
        if self.many and all(map(_of_a_start, items)):
            return self._by_agent("pass_post", _POST_LIMIT_S, Post(heard, list(items)))
        return None

    def _by_agent(self, method: str, limit_s: float, *arguments: Any) -> Reply | None:
        try:
            call = getattr(self._agent, method).remote(self._worker, *arguments)
            reply: Reply | None = ray.get(call, timeout=limit_s)
        except ray.exceptions.RayError as error:
            logger.info("worker %d sends its messages itself: its agent does not answer (%s)", self._worker, error)
            self._not_before = time.monotonic() + _WITHOUT_AGENT_S
            return None
        return reply


def _of_a_start(item: Item) -> bool:
    return item.data["event"] in _OF_A_START if item.kind == "event" else item.kind in _KINDS_OF_A_START
