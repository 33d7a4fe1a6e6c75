"""Sends a worker's messages to the controller: step reports through its node's agent, everything else itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from elastic.runtime.messages import Item, Reply

logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
# An agent answers within its own limit for the controller. One that does not is frozen, and its node is suspected
# earlier: what the controller hears of this worker must not wait for it again soon.
AGENT_LIMIT_S, _WITHOUT_AGENT_S = 1.0, 30.0


class Delivery:
    """Called by the outbox, on its thread. Raises what Ray raises where the controller cannot be reached."""

    def __init__(self, worker: int, controller: Any) -> None:
        self._worker = worker
        self._controller = controller
        self._agent: Any = None
        self._not_before = 0.0

    def through(self, agent: Any) -> None:
        """Step reports go to this agent, which joins them with those of the node's other workers."""
        self._agent = agent

    def __call__(self, items: Sequence[Item], heard: int | None) -> Reply:
        if self._agent is not None and heard is not None and time.monotonic() >= self._not_before:
            # Nothing urgent may wait for other workers.
            reply = self._joined(items, heard) if all(i.kind == "step" and not i.urgent for i in items) else None
            if reply is not None:
                return reply
        call = self._controller.deliver.remote(self._worker, list(items), heard)
        answered: Reply = ray.get(call, timeout=_LIMIT_S)
        return answered

    def _joined(self, items: Sequence[Item], heard: int) -> Reply | None:
        try:
            call = self._agent.relay.remote(self._worker, heard, [item.data for item in items])
            reply: Reply | None = ray.get(call, timeout=AGENT_LIMIT_S)
        except ray.exceptions.RayError as error:
            logger.info("worker %d sends its step reports itself: its agent does not answer (%s)", self._worker, error)
            self._not_before = time.monotonic() + _WITHOUT_AGENT_S
            return None
        return reply
