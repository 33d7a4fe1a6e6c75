"""Tracks when a rank's snapshot is complete: committed here, and received by the nodes that keep its replica or parity.

Without such a node it is complete once its hash is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic.checkpoint.memory.messages import OpenShard, Progress
from elastic.checkpoint.memory.server.commit_thread import CommitThread, Job
from elastic.checkpoint.memory.server.hasher import Hasher
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.server.sender import Sender, Spares
from elastic.checkpoint.memory.shard_buffers import ShardKey


class Replication:
    """Of one rank in one generation. `on_progress` is called from any thread with each change."""

    def __init__(
        self, shards: NodeShards, request: OpenShard, token: bytes, on_progress: Callable[[Progress], None]
    ) -> None:
        self.generation, self.rank = request.template.generation, request.template.rank
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._complete_step = -1
        self._committed_at = self._seconds = 0.0
        key = ShardKey(self.generation, self.rank, replica=False)
        spares = Spares(request.spares)
        self._senders: list[CommitThread] = [
            Sender(shards, request, target, token, self._update, spares) for target in request.targets
        ] or [Hasher(shards, key, self._update)]
        for sender in self._senders:
            sender.start()

    @property
    def progress(self) -> Progress:
        troubled = [sender for sender in self._senders if sender.problem is not None]
        lost = [sender for sender in troubled if sender.lost]
        sent = sum(sender.sent_bytes for sender in self._senders)
        # Replication that was given up comes first: it is the decisive reason.
        failed = "; ".join(str(sender.problem) for sender in sorted(troubled, key=lambda each: not each.lost)) or None
        lacks_memory = any(sender.lacks_memory for sender in lost)
        moved = next((sender.moved for sender in self._senders if sender.moved is not None), None)
        return Progress(
            self.generation, self._complete_step, failed, bool(lost), lacks_memory, self._seconds, sent, moved
        )

    @property
    def alive(self) -> bool:
        return any(sender.is_alive() for sender in self._senders)

    def commit(self, job: Job) -> None:
        with self._lock:
            self._committed_at = time.monotonic()
        for sender in self._senders:
            sender.send(job)
        self._update()

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

    def _update(self) -> None:
        # Reported under the lock, so that the newest state is reported last.
        with self._lock:
            step = min(sender.sent_step for sender in self._senders)
            if step > self._complete_step:
                self._complete_step, self._seconds = step, time.monotonic() - self._committed_at
            self._on_progress(self.progress)
