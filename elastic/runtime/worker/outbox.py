"""Reliable, ordered delivery from a worker to the controller: no message is lost while the controller is unreachable.

Items are kept until the controller has taken them. A restarted controller lacks what its predecessor had only in
memory: events that are not in the journal, and all step reports and shard records. They are sent again, in order and
before any other item, when the incarnation changes; until then the controller takes nothing else from here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge

import ray

from elastic.runtime.messages import Item, Reply

logger = logging.getLogger(__name__)

# How long step reports may wait to be sent together; other items are sent at once.
_LINGER_S = 0.1
# Enough for the steps between two checkpoints at any sensible cadence.
_KEEP = 1024


@dataclass
class _Queue:
    """`waiting` items; and of the taken ones, `events` that may be in no journal, and `replays`."""

    waiting: deque[Item] = field(default_factory=deque)
    events: deque[Item] = field(default_factory=deque)
    replays: deque[Item] = field(default_factory=lambda: deque(maxlen=_KEEP))

    def taken(self, count: int, durable: int) -> None:
        """The controller has taken the first `count` waiting items."""
        for _ in range(count):
            item = self.waiting.popleft()
            if item.kind == "event":
                self.events.append(item)
            elif item.replay:
                self.replays.append(item)
        while self.events and self.events[0].number <= durable:
            self.events.popleft()

    def again(self) -> int:
        """Queue again, before the rest, what another controller may lack; returns the number of these items."""
        kept = list(merge(self.events, self.replays, key=lambda item: item.number))
        self.waiting.extendleft(reversed(kept))
        self.events.clear()
        self.replays.clear()
        return len(kept)


class Outbox:
    """`send(items, incarnation)` delivers a batch to the controller, which is the one of that incarnation as far as is
    known (None: not at all), and returns the Reply; it raises when the controller cannot be reached."""

    def __init__(
        self,
        send: Callable[[Sequence[Item], int | None], Reply],
        on_fenced: Callable[[], None],
        retry_s: float = 0.2,
    ) -> None:
        self._send = send
        self._on_fenced = on_fenced
        self._retry_s = retry_s
        self._queue = _Queue()
        self._wake = threading.Condition()
        self._closed = False
        self._count = 0
        # The incarnation of the last reply, and the newest known one.
        self._incarnation: int | None = None
        self._newest: int | None = None
        self._thread = threading.Thread(target=self._run, name="elastic-outbox", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Never blocks and never raises."""
        with self._wake:
            self._count += 1
            self._queue.waiting.append(replace(item, number=self._count))
            self._wake.notify()

    def drained(self, timeout_s: float) -> bool:
        """Wait until the controller has taken all items."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue.waiting, timeout_s)

    def restarted(self, incarnation: int) -> None:
        """Another controller has taken over: send what it may lack, even without new items."""
        with self._wake:
            self._newest = max(incarnation, self._newest or 0)
            self._wake.notify()

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
                reply = self._send(batch, self._incarnation)
            except (ray.exceptions.RayError, OSError) as error:
                # The controller is restarting or unreachable: the agent's lease bounds this, not the outbox.
                logger.debug("the controller took nothing (%s); %d messages wait", error, len(batch))
                with self._wake:
                    self._wake.wait_for(lambda: self._closed, self._retry_s)
                continue
            self._answered(batch, reply)
            if reply.fenced:
                self._on_fenced()
                return

    def _next_batch(self) -> list[Item] | None:
        with self._wake:
            while True:
                self._wake.wait_for(lambda: bool(self._queue.waiting) or self._closed or self._another is not None)
                if self._another is not None:
                    self._meet(self._another)
                elif self._queue.waiting:
                    break
                else:
                    return None
            if not any(item.urgent for item in self._queue.waiting):
                self._wake.wait_for(lambda: self._closed or any(i.urgent for i in self._queue.waiting), _LINGER_S)
            return list(self._queue.waiting)

    def _answered(self, batch: list[Item], reply: Reply) -> None:
        with self._wake:
            if reply.taken:
                self._incarnation = reply.incarnation
                self._queue.taken(len(batch), reply.durable)
            else:
                self._meet(reply.incarnation)
            self._wake.notify_all()

    @property
    def _another(self) -> int | None:
        """The incarnation of a controller that has taken over and has not been sent the kept items."""
        if self._newest is None or self._incarnation is None or self._newest <= self._incarnation:
            return None
        return self._newest

    def _meet(self, incarnation: int) -> None:
        self._incarnation = incarnation
        logger.info("controller %d has taken over: %d messages are sent to it again", incarnation, self._queue.again())
