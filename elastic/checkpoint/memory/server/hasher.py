"""Hashes of committed snapshots that are not sent to another node."""

from __future__ import annotations

from collections.abc import Callable

from elastic.checkpoint.memory.server.commit_thread import CommitThread, Job
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.shard_buffers import ShardKey
from elastic.core.errors import IntegrityError


class Hasher(CommitThread):
    """Takes the place of a `Sender`. A snapshot counts as sent once its hash is known: damage is detected from then on.

    A thread of its own, because hashing gigabytes takes seconds.
    """

    def __init__(self, shards: NodeShards, key: ShardKey, on_change: Callable[[], None]) -> None:
        super().__init__(f"hash of rank {key.rank}", on_change)
        self._shards = shards
        self._key = key

    def _work(self) -> None:
        job: Job | None = None
        while (job := self._next(job)) is not None:
            try:
                self._shards.hash_own(self._key, job.number, job.step)
            except IntegrityError:
                continue  # freed or overwritten by a newer snapshot or generation
            self.sent_step = job.step
            self._on_change()

    def _refusal(self, why: str) -> str:
        return f"the {self.name} could not be computed: {why}"
