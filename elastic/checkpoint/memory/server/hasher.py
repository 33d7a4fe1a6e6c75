"""Hashes of committed snapshots that go to no other node: a thread, since gigabytes take a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.server.sender import Job
from elastic.checkpoint.memory.shard_buffers import ShardKey
from elastic.core.errors import IntegrityError

logger = logging.getLogger(__name__)


class Hasher(threading.Thread):
    """Used as a `Sender` is. A snapshot counts as sent once its hash is known: from then on damage is detected."""

    sent_bytes = 0
    lacks_memory = False

    def __init__(self, shards: NodeShards, key: ShardKey, on_change: Callable[[], None]) -> None:
        super().__init__(name=f"hash of rank {key.rank}", daemon=True)
        self.sent_step = -1
        self.problem: str | None = None
        self.lost = False
        self._shards = shards
        self._key = key
        self._on_change = on_change
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._retiring = self._stopped = False

    def send(self, job: Job) -> None:
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def retire(self) -> None:
        """End the thread once the last commit is hashed."""
        with self._changed:
            self._retiring = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        try:
            self._hash_all()
        except Exception as error:
            logger.exception("%s ends", self.name)
            self.lost, self.problem = True, f"the {self.name} could not be computed: {error!r}"
            self._on_change()

    def _hash_all(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._shards.hash_own(self._key, job.number, job.step)
            except IntegrityError:
                continue  # freed or overwritten: a newer snapshot or generation has taken its place
            self.sent_step = job.step
            self._on_change()

    def _next(self) -> Job | None:
        """The newest commit; None when no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._retiring or self._job is not None)
            job, self._job = self._job, None
            return None if self._stopped else job
