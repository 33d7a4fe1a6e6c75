"""When a rank's snapshot is complete: committed here, and received by every node that holds its replica or parity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.checkpoint.memory.server.node_shards import Store
from elastic.checkpoint.memory.server.sender import Job, Sender
from elastic.checkpoint.memory.shard_buffers import Mark
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.transport.handshake import Address


@dataclass(frozen=True)
class Progress:
    """`complete_step` is -1 while there is none; `seconds` is what the last one took from its commit on."""

    generation: int
    complete_step: int
    failed: str | None
    seconds: float
    sent_bytes: int


class Replication:
    """One rank's in one generation. `told` is called from any thread with what is new."""

    def __init__(
        self,
        store: Store,
        template: ShardRecord,
        targets: Sequence[Address],
        token: bytes,
        base: Mark | None,
        stripe: Sequence[int],
        told: Callable[[Progress], None],
    ) -> None:
        self.generation, self.rank = template.generation, template.rank
        self._told = told
        self._lock = threading.Lock()
        self._committed_step = self._complete_step = -1
        self._committed_at = self._seconds = 0.0
        self._senders = [Sender(store, template, target, token, base, stripe, self._look) for target in targets]
        for sender in self._senders:
            sender.start()

    @property
    def progress(self) -> Progress:
        problems = [sender.problem for sender in self._senders if sender.problem is not None]
        sent = sum(sender.sent_bytes for sender in self._senders)
        failed = "; ".join(problems) or None
        return Progress(self.generation, self._complete_step, failed, self._seconds, sent)

    @property
    def alive(self) -> bool:
        return any(sender.is_alive() for sender in self._senders)

    def commit(self, job: Job) -> None:
        with self._lock:
            self._committed_step, self._committed_at = job.step, time.monotonic()
        for sender in self._senders:
            sender.send(job)
        self._look()

    def retire(self) -> None:
        for sender in self._senders:
            sender.retire()

    def stop(self) -> None:
        for sender in self._senders:
            sender.stop()

    def join(self, limit_s: float) -> bool:
        """True when all threads have ended."""
        deadline = time.monotonic() + limit_s
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))
        return not self.alive

    def _look(self) -> None:
        # Told under the lock, so that the newest state is told last.
        with self._lock:
            step = min((sender.sent_step for sender in self._senders), default=self._committed_step)
            if step > self._complete_step:
                self._complete_step, self._seconds = step, time.monotonic() - self._committed_at
            self._told(self.progress)
