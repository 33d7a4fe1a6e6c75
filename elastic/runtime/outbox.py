"""Reliable, ordered delivery from a worker to the controller: nothing is lost while the controller is away.

Items are kept until the controller has taken them. A controller that was restarted has lost what it had only in memory,
so the latest shard record and the step reports since the last planned end are sent again when its incarnation changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

logger = logging.getLogger(__name__)

# How long step reports may wait for company; everything else is sent at once.
_LINGER_S = 0.1
# Enough for the steps between two checkpoints at any sensible cadence.
_KEEP = 1024


@dataclass(frozen=True)
class Item:
    """One message. `kind` is "event", "step", "restored", "shard" or "cadence"; `key` tells duplicates apart."""

    kind: str
    data: Any
    urgent: bool = True
    replay: bool = False


@dataclass(frozen=True)
class Reply:
    """The controller's answer. `fenced`: this worker is no longer part of the run and must end."""

    incarnation: int
    fenced: bool = False


@dataclass
class _Queue:
    waiting: deque[Item] = field(default_factory=deque)
    sent: deque[Item] = field(default_factory=lambda: deque(maxlen=_KEEP))


class Outbox:
    """`send(items)` delivers a batch and returns the Reply; it raises when the controller cannot be reached."""

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Reply],
        on_fenced: Callable[[], None],
        retry_s: float = 0.2,
    ) -> None:
        self._send = send
        self._on_fenced = on_fenced
        self._retry_s = retry_s
        self._queue = _Queue()
        self._wake = threading.Condition()
        self._closed = False
        self._incarnation: int | None = None
        self._thread = threading.Thread(target=self._run, name="elastic-outbox", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Never blocks and never raises."""
        with self._wake:
            self._queue.waiting.append(item)
            self._wake.notify()

    def drained(self, timeout_s: float) -> bool:
        """Wait until everything put so far has been taken by the controller."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue.waiting, timeout_s)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            try:
                reply = self._send(batch)
            except (ray.exceptions.RayError, OSError) as error:
                # The controller is being restarted or cannot be reached: the agent's lease bounds this, not we.
                logger.debug("the controller took nothing (%s); %d messages wait", error, len(batch))
                with self._wake:
                    self._wake.wait_for(lambda: self._closed, self._retry_s)
                continue
            self._taken(batch, reply)
            if reply.fenced:
                self._on_fenced()
                return

    def _next_batch(self) -> list[Item] | None:
        with self._wake:
            self._wake.wait_for(lambda: bool(self._queue.waiting) or self._closed)
            if self._closed and not self._queue.waiting:
                return None
            if not any(item.urgent for item in self._queue.waiting):
                self._wake.wait_for(lambda: self._closed or any(i.urgent for i in self._queue.waiting), _LINGER_S)
            return list(self._queue.waiting)

    def _taken(self, batch: list[Item], reply: Reply) -> None:
        with self._wake:
            for _ in batch:
                item = self._queue.waiting.popleft()
                if item.replay:
                    self._queue.sent.append(item)
            if self._incarnation not in (None, reply.incarnation):
                logger.info("controller %d has taken over: sending %d again", reply.incarnation, len(self._queue.sent))
                self._queue.waiting.extendleft(reversed(self._queue.sent))
                self._queue.sent.clear()
            self._incarnation = reply.incarnation
            self._wake.notify_all()
