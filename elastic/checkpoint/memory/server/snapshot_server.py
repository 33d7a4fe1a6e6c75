"""A node's snapshot server: its sockets and threads. Runs in the node's agent and imports neither torch nor Ray."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import struct
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
from elastic.core.errors import UsageError
from elastic.transport.channel import Channel
from elastic.transport.handshake import TOKEN_BYTES, Address, Refused, admit, big_buffers

logger = logging.getLogger(__name__)

_BACKLOG = 512
_JOIN_LIMIT_S = 15.0
# Limit of connections in their handshake; each has a thread. A holder of the token needs milliseconds for it.
_MOST_UNAUTHENTICATED = 256
_PAUSE_S = 0.1


class SnapshotServer:
    """Listens on (host, free port) and on an abstract Unix socket, and starts its threads.

    `limit_bytes` None: the memory that the node has available at each request (MemAvailable, cgroup v1 and v2).
    """

    def __init__(self, token: bytes, host: str, *, limit_bytes: int | None = None) -> None:
        if len(token) != TOKEN_BYTES:
            raise UsageError(f"the run's token has {len(token)} bytes, not {TOKEN_BYTES}")
        self._token = token
        self._pool = SegmentPool(limit_bytes)
        self._shards = NodeShards(self._pool)
        self._parity = Parity(self._pool, partial(read_shard, token))
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        # In the order of their arrival.
        self._unauthenticated: dict[Channel, None] = {}
        self._threads: set[threading.Thread] = set()
        self._replications: list[Replication] = []
        self._sent_bytes = self._received_bytes = 0
        self._last_seconds: dict[int, float] = {}
        self._closed = False
        self._tcp = _listen_tcp(host)
        self._address: Address = (host, self._tcp.getsockname()[1])
        # Random, so that no other user of the machine can take the name first.
        self._local_name = f"elastic-memory-{secrets.token_hex(16)}"
        self._unix = _listen_unix(self._local_name)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(target=self._accept, name="memory server", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> Address:
        return self._address

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
        with self._lock:
            sent = self._sent_bytes + sum(replication.progress.sent_bytes for replication in self._replications)
            return {
                **self._pool.stats(),
                "sent_bytes": sent,
                "received_bytes": self._received_bytes,
                "replication_s": dict(self._last_seconds),
                "connections": len(self._channels),
                "threads": len(self._threads) + 1,
            }

    def close(self) -> None:
        """End all threads, within a limit, and free all memory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels, replications = list(self._channels), list(self._replications)
            os.eventfd_write(self._wake, 1)
        for replication in replications:
            replication.stop()
        for channel in channels:
            channel.shut()
        deadline = time.monotonic() + _JOIN_LIMIT_S
        self._acceptor.join(_JOIN_LIMIT_S)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = [replication.join(max(0.0, deadline - time.monotonic())) for replication in replications]
        if not all(ended) or any(thread.is_alive() for thread in threads):
            logger.warning("a thread of the memory server has not ended within %s s", _JOIN_LIMIT_S)
        self._pool.close(max(0.0, deadline - time.monotonic()))
        for sock in (self._tcp, self._unix):
            sock.close()
        os.close(self._wake)

    def _accept(self) -> None:
        poll = select.poll()
        for fd in (self._tcp.fileno(), self._unix.fileno(), self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake in ready:
                return
            for listener in (self._tcp, self._unix):
                if listener.fileno() in ready:
                    self._take(listener)

    def _take(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            self._wait_for_resources(error)  # out of descriptors
            return
        try:
            channel = Channel(sock)
        except OSError:  # the other side is gone already
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(channel, sock), name="memory connection", daemon=True)
        with self._lock:
            self._channels.add(channel)
            self._threads.add(thread)
            self._unauthenticated[channel] = None
            if self._closed:
                channel.shut()
            while len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
                self._drop_oldest_unauthenticated()
        try:
            thread.start()
        except (
            RuntimeError
        ) as error:  # out of processes, perhaps because of unauthenticated connections that keep their threads
            with self._lock:
                self._forget(channel, thread)
                if self._unauthenticated:
                    self._drop_oldest_unauthenticated()
            channel.close()
            self._wait_for_resources(error)

    def _wait_for_resources(self, error: Exception) -> None:
        """Retry a little later instead of at once; `close` ends the wait."""
        logger.warning("a connection could not be accepted: %s", error)
        select.select([self._wake], [], [], _PAUSE_S)

    def _drop_oldest_unauthenticated(self) -> None:
        channel = next(iter(self._unauthenticated))
        del self._unauthenticated[channel]
        channel.shut()

    def _forget(self, channel: Channel, thread: threading.Thread) -> None:
        self._channels.discard(channel)
        self._threads.discard(thread)
        self._unauthenticated.pop(channel, None)
        self._sent_bytes += channel.sent_bytes

    def _serve(self, channel: Channel, sock: socket.socket) -> None:
        try:
            local = sock.family == socket.AF_UNIX
            if local and _user_of(sock) != os.geteuid():
                raise Refused(f"it belongs to user {_user_of(sock)}")
            admit(channel, self._token)
            with self._lock:
                self._unauthenticated.pop(channel, None)
            if local:
                WorkerSession(self._pool, channel, self._replicate).serve()
            else:
                PeerSession(self._pool, self._parity, channel, self._count_received).serve()
        except Refused as error:
            logger.warning("a connection was refused: %s", error)
        except OSError as error:
            logger.debug("a connection ended: %s", error)
        except Exception:
            logger.exception("a connection is closed after a request that could not be understood")
        finally:
            with self._lock:
                self._forget(channel, threading.current_thread())
            channel.close()

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


def _listen_tcp(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    big_buffers(sock)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(b"\0" + name.encode())
    sock.listen(_BACKLOG)
    return sock


def _user_of(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    return int(user)
