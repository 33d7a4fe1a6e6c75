"""Sends a worker's messages to the controller: step reports through its node's agent, where there are many workers what
all of them say when a generation starts or ends as well, and everything else itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from elastic.core.events import CollectiveFailed, GroupJoined, MemoryLost, TrainingReached, WorkerCompleted, WorkerLeft
from elastic.runtime.messages import POST_LIMIT_S, Item, Post, Reply

logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
# An agent answers within its own limit for the controller. One that does not is frozen, and its node is suspected
# earlier: what the controller hears of this worker must not wait for it again soon.
AGENT_LIMIT_S, _WITHOUT_AGENT_S = 1.0, 30.0
# What every worker of a generation says when it starts, and when it ends.
_OF_AN_END = frozenset(event.__name__ for event in (CollectiveFailed, MemoryLost, WorkerCompleted, WorkerLeft))
_OF_ALL = frozenset(event.__name__ for event in (GroupJoined, TrainingReached)) | _OF_AN_END
_KINDS_OF_ALL = frozenset(("restored", "moved", "step"))
# Of the time that a worker has to leave: one whose agent is frozen says it itself in the rest.
_OF_ABORT = 0.6


class Delivery:
    """Called by the outbox, on its thread. Raises what Ray raises where the controller cannot be reached.

    `many`: there are many workers. What all of them say when a generation starts or ends then goes through the agent
    too. They have `abort_timeout_s` to leave it.
    """

    def __init__(self, worker: int, controller: Any, abort_timeout_s: float) -> None:
        self._worker = worker
        self._controller = controller
        self._agent: Any = None
        self._not_before = 0.0
        self._end_limit_s = min(POST_LIMIT_S, _OF_ABORT * abort_timeout_s)
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
        if self.many and all(item.kind in _KINDS_OF_ALL or _event(item) in _OF_ALL for item in items):
            ends = any(_event(item) in _OF_AN_END for item in items)
            limit_s = self._end_limit_s if ends else POST_LIMIT_S
            return self._by_agent("pass_post", limit_s, Post(heard, list(items), limit_s))
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


def _event(item: Item) -> str:
    return str(item.data["event"]) if item.kind == "event" else ""
