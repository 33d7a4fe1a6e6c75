"""A node's snapshot server: its sockets and threads. Runs in the node's agent and imports neither torch nor Ray."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elastic.checkpoint.memory.messages import OpenShard, Progress
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.server.parity import Parity
from elastic.checkpoint.memory.server.replication import Replication
from elastic.checkpoint.memory.server.segment_pool import SegmentPool
from elastic.checkpoint.memory.server.sessions import PeerSession, WorkerSession
from elastic.checkpoint.memory.server.transfer import read_shard
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.snapshots import Held
from elastic.transport.channel import Channel
from elastic.transport.handshake import Address
from elastic.transport.listener import Listener

logger = logging.getLogger(__name__)

_JOIN_LIMIT_S = 15.0


class SnapshotServer:
    """Listens on (host, free port) and on an abstract Unix socket, and starts its threads.

    `limit_bytes` None: the memory that the node has available at each request (MemAvailable, cgroup v1 and v2).
    """

    def __init__(self, token: bytes, host: str, *, limit_bytes: int | None = None) -> None:
        self._token = token
        self._pool = SegmentPool(limit_bytes)
        self._shards = NodeShards(self._pool)
        self._parity = Parity(self._pool, partial(read_shard, token))
        self._lock = threading.Lock()
        self._replications: list[Replication] = []
        self._sent_bytes = self._received_bytes = 0
        self._last_seconds: dict[int, float] = {}
        self._closed = False
        # Random, so that no other user of the machine can take the name first.
        self._local_name = f"elastic-memory-{secrets.token_hex(16)}"
        self._listener = Listener(token, host, self._serve, name="memory", local_name=self._local_name)

    @property
    def address(self) -> Address:
        return self._listener.address

    @property
    def local_name(self) -> str:
        """What workers of this node pass to `SnapshotClient`."""
        return self._local_name

    def held(self) -> tuple[Held, ...]:
        """The complete shards here, own and replicas, and those that can be rebuilt from parity."""
        return self._pool.held()

    def record(self, held: Held, *, digests: bool = True) -> ShardRecord:
        """The shard's record, with partial digests of the bytes that are in memory now.

        Their xxh3 is compared with the sender's. The result is cached; the GIL is released meanwhile, and calls for
        several shards may run in parallel. Raises IntegrityError when the shard is no longer here or is damaged.
        """
        return self._shards.record(held, digests)

    def rebuild(self, held: Held, sources: Mapping[int, Address]) -> Held:
        """Rebuild a shard from the parity here (`held.stripe`) and the stripe's other shards, read from `sources`.

        Returns the result, which is held as a replica. Raises IntegrityError when the parity is gone or the result does
        not match the rank's hash, and StorageError when another shard cannot be read or memory is lacking.
        """
        return self._parity.rebuild(held, sources)

    def worked_bytes(self) -> int:
        """Bytes processed by `record` and `rebuild` so far: while it does not grow, they make no progress."""
        return self._pool.work.bytes

    def stats(self) -> dict[str, Any]:
        """Figures for the journal: bytes held, segments, bytes sent and received, seconds of the last replications."""
        listener = self._listener.stats()
        with self._lock:
            sent = self._sent_bytes + sum(replication.progress.sent_bytes for replication in self._replications)
            return {
                **self._pool.stats(),
                **listener,
                "sent_bytes": listener["sent_bytes"] + sent,
                "received_bytes": self._received_bytes,
                "replication_s": dict(self._last_seconds),
            }

    def close(self) -> None:
        """End all threads, within a limit, and free all memory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            replications = list(self._replications)
        deadline = time.monotonic() + _JOIN_LIMIT_S
        self._listener.shut()
        for replication in replications:
            replication.stop()
        quiet = self._listener.close(_JOIN_LIMIT_S)
        ended = [replication.join(max(0.0, deadline - time.monotonic())) for replication in replications]
        if not all(ended) or not quiet:
            logger.warning("a thread of the memory server has not ended within %s s", _JOIN_LIMIT_S)
        self._pool.close(max(0.0, deadline - time.monotonic()))

    def _serve(self, channel: Channel, local: bool) -> None:
        if local:
            WorkerSession(self._pool, channel, self._replicate).serve()
        else:
            PeerSession(self._pool, self._parity, channel, self._count_received).serve()

    def _replicate(self, request: OpenShard, on_progress: Callable[[Progress], None]) -> Replication:
        template = request.template

        def report(progress: Progress) -> None:
            if progress.complete_step >= 0:
                self._last_seconds[template.rank] = progress.seconds
            on_progress(progress)

        with self._lock:
            # Also replications whose worker is gone: a generation that is over has nothing more to send. One of a
            # connection that the rank has replaced would send the same concurrently with the new one.
            for replication in self._replications:
                if replication.generation < template.generation or replication.rank == template.rank:
                    replication.stop()
            ended = [replication for replication in self._replications if not replication.alive]
            self._sent_bytes += sum(replication.progress.sent_bytes for replication in ended)
            self._replications = [replication for replication in self._replications if replication not in ended]
            new = Replication(self._shards, request, self._token, report)
            self._replications.append(new)
            if self._closed:
                new.stop()
            return new

    def _count_received(self, count: int) -> None:
        with self._lock:
            self._received_bytes += count
