"""The requests that a connection may send to a node's server: one thread per connection, one request at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

from typing_extensions import assert_never

from elastic.checkpoint.memory.messages import (
    READER_LIMIT_S,
    Accepted,
    BeginSnapshot,
    CommitSnapshot,
    Done,
    GivenSegment,
    Leased,
    LeaseShard,
    Opened,
    OpenParity,
    OpenReplica,
    OpenShard,
    PeerRequest,
    ProbeReceiving,
    ProbeSending,
    Progress,
    PushReplica,
    PushShare,
    ReadShard,
    Release,
    SettleSnapshot,
    ShardHash,
    WorkerRequest,
    expected,
    peer_request,
    to_json,
    worker_request,
)
from elastic.checkpoint.memory.segments import packed
from elastic.checkpoint.memory.server.commit_thread import Job
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.server.parity import Parity
from elastic.checkpoint.memory.server.replication import Replication
from elastic.checkpoint.memory.server.segment_pool import SegmentPool
from elastic.checkpoint.memory.server.transfer import receive_share
from elastic.checkpoint.memory.shard_buffers import ShardKey
from elastic.core.errors import ElasticError, IntegrityError
from elastic.transport.channel import Channel, Message, checked, error_message

logger = logging.getLogger(__name__)

_IDLE_S = 30.0

Replicate = Callable[[OpenShard, Callable[[Progress], None]], Replication]


class WorkerSession:
    """A worker of this node, over the Unix socket. Requests in, `{"answer": ...}` and `{"progress": ...}` out."""

    def __init__(self, pool: SegmentPool, channel: Channel, replicate: Replicate) -> None:
        self._pool = pool
        self._shards = NodeShards(pool)
        self._channel = channel
        self._replicate = replicate
        self._replication: Replication | None = None
        self._key: ShardKey | None = None
        # The segments that the worker has mapped; those of them that were given to it in this generation, two at most.
        self._mapped: set[int] = set()
        self._given: set[int] = set()
        self._writing: int | None = None
        # The threads that send replicas report progress concurrently with answers.
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Until the worker closes the connection or is gone: raises OSError then."""
        try:
            while True:
                _wait(self._channel, self._pool, self._key, self._mapped)
                message, _ = self._channel.receive()
                try:
                    self._handle(worker_request(message))
                except ElasticError as error:
                    self._answer(error_message(error))
        finally:
            self._pool.take_back(self._mapped)
            # Committed snapshots are complete on this node: they are sent although the worker is gone.
            if self._replication is not None:
                self._replication.retire()

    def _handle(self, request: WorkerRequest) -> None:
        match request:
            case OpenShard():
                self._open(request)
            case BeginSnapshot():
                self._begin()
            case CommitSnapshot():
                self._commit(request)
            case SettleSnapshot():
                self._pool.settle((self._own_key().generation, request.step))
                self._answer(to_json(Done()))
            case LeaseShard():
                self._lease(request)
            case _:
                assert_never(request)

    def _open(self, request: OpenShard) -> None:
        template = request.template
        key = ShardKey(template.generation, template.rank, replica=False)
        try:
            self._shards.open(key, template, request.base)
        except ElasticError:
            self._keep(())
            raise
        self._key, self._writing = key, None
        if self._replication is not None:
            self._replication.stop()
        self._replication = self._replicate(request, self._report)
        newest = self._shards.newest(key)
        if newest is not None:
            # The worker has reconnected: its last commit may not have been sent, or not reported.
            self._replication.commit(Job(*newest))
        # What another connection of this worker has lent is freed by its end, unless it is a buffer still.
        self._given = set()
        self._keep(self._pool.kept(key, request.mapped))
        self._answer(to_json(Opened(newest[0] if newest is not None else -1, tuple(sorted(self._mapped)))))

    def _keep(self, numbers: Iterable[int]) -> None:
        """The worker has these mapped, and unmaps all others."""
        before, self._mapped = self._mapped, set(numbers)
        for number in self._mapped:
            self._pool.lend(number)
        self._pool.take_back(before - self._mapped)

    def _begin(self) -> None:
        with self._shards.writing(self._own_key(), self._mapped) as (number, segment):
            fresh = number not in self._mapped
            self._given.add(number)
            # With two it has all that it needs: what it keeps from older generations is unmapped.
            self._keep(self._given if len(self._given) == 2 else {*self._mapped, number})
            self._writing = number
            self._answer(to_json(GivenSegment(number, segment.nbytes)), segment.fd if fresh else None)

    def _commit(self, request: CommitSnapshot) -> None:
        key, number, step = self._own_key(), self._writing, request.step
        if number is None or self._replication is None:
            raise IntegrityError(f"step {step} was committed before memory was requested for it")
        self._shards.commit(key, number, step, request.extra_state)
        self._writing = None
        self._answer(to_json(Done()))
        self._replication.commit(Job(step, number, request.extra_state))

    def _lease(self, request: LeaseShard) -> None:
        with self._shards.reading(request.generation, request.step, request.rank) as reading:
            fd = reading.segment.reader_fd()
            try:
                self._answer(to_json(Leased(reading.segment.nbytes)), fd)
            finally:
                os.close(fd)
            _await_release(self._channel)
        # The bytes that were read are valid only now: the buffer was kept until here.
        self._answer(to_json(Done()))

    def _own_key(self) -> ShardKey:
        if self._key is None:
            raise IntegrityError("a worker asked for memory before it opened a shard")
        return self._key

    def _answer(self, answer: Message, fd: int | None = None) -> None:
        with self._sending:
            self._channel.send({"answer": answer}, fd)

    def _report(self, progress: Progress) -> None:
        try:
            with self._sending:
                self._channel.send({"progress": to_json(progress)})
        except OSError:
            self._channel.shut()  # the worker is gone, which `serve` notices


class PeerSession:
    """Another node's server that sends replicas or shares of parity, or a worker of another node that reads."""

    def __init__(self, pool: SegmentPool, parity: Parity, channel: Channel, on_received: Callable[[int], None]) -> None:
        self._pool = pool
        self._shards = NodeShards(pool)
        self._parity = parity
        self._channel = channel
        self._on_received = on_received
        self._key: ShardKey | None = None
        self._rank = -1

    def serve(self) -> None:
        """Until the other side closes the connection or is gone: raises OSError then."""
        while True:
            _wait(self._channel, self._pool, self._key)
            message, _ = self._channel.receive()
            try:
                self._handle(peer_request(message))
            except ElasticError as error:
                self._channel.send(error_message(error))

    def _handle(self, request: PeerRequest) -> None:
        match request:
            case OpenReplica():
                key = ShardKey(request.template.generation, request.template.rank, replica=True)
                self._shards.open(key, request.template, request.base)
                self._opened(key, request.template.rank)
            case OpenParity():
                key = self._parity.open(request.ranks, request.template, request.base)
                self._opened(key, request.template.rank)
            case PushReplica():
                self._push(request)
            case PushShare():
                self._share(request)
            case ReadShard():
                self._read(request)
            case ProbeSending():
                self._channel.recv_into([memoryview(bytearray(request.nbytes))])
                self._send(Done())
            case ProbeReceiving():
                self._channel.send_bytes(bytes(request.nbytes))
                self._send(Done())
            case _:
                assert_never(request)

    def _opened(self, key: ShardKey, rank: int) -> None:
        self._key, self._rank = key, rank
        self._send(Done())

    def _begin(self, request: PushReplica | PushShare) -> ShardKey:
        if self._key is None or bool(self._key.stripe) != isinstance(request, PushShare):
            raise IntegrityError("a snapshot was sent before its shard was opened")
        if request.settled is not None:
            self._pool.settle(request.settled)
        return self._key

    def _push(self, request: PushReplica) -> None:
        key = self._begin(request)
        if self._shards.has(key, request.step):
            # The connection broke between the last byte and the answer.
            self._send(Accepted(True, 0))
            return
        with self._shards.receiving(key) as receiving:
            self._send(Accepted(False, 0))
            self._channel.recv_into([receiving.view])
            trailer = expected(checked(self._channel.receive()[0]), ShardHash)
            self._shards.finish(receiving, request.step, request.extra_state, trailer.xxh3)
            received = len(receiving.view)
        self._on_received(received)
        self._send(Done())

    def _share(self, request: PushShare) -> None:
        key = self._begin(request)
        with self._parity.contributing(key, self._rank, request.step, request.extra_state) as share:
            if share is None or share.done:
                self._send(Accepted(True, 0))
                return
            self._send(Accepted(False, share.begin))
            self._on_received(receive_share(self._channel, share))
        self._send(Done())

    def _read(self, request: ReadShard) -> None:
        with self._shards.reading(request.generation, request.step, request.rank) as reading:
            for begin, width, rows, stride in request.parts:
                if (end := begin + (rows - 1) * stride + width) > reading.segment.nbytes:
                    raise IntegrityError(f"bytes [{begin}, {end}) are not in {reading.segment.nbytes}")
            self._channel.cork(True)
            self._send(Done())
            for begin, width, rows, stride in request.parts:
                if rows == 1:
                    self._channel.send_file(reading.segment.fd, begin, width)
                    continue
                with reading.segment.map() as memory:
                    for part in packed(memory, begin, width, rows, stride):
                        self._channel.send_bytes(part)
                        self._channel.sent_bytes += len(part)
            self._channel.cork(False)
            _await_release(self._channel)
        self._send(Done())

    def _send(self, answer: Any) -> None:
        self._channel.send(to_json(answer))


def _wait(channel: Channel, pool: SegmentPool, key: ShardKey | None, mapped: Collection[int] = ()) -> None:
    """Until the next request; meanwhile the memory for the next snapshots is prepared."""
    while channel.idle(0 if key is not None and pool.prepare(key, mapped) else _IDLE_S):
        pass


def _await_release(channel: Channel) -> None:
    if channel.idle(READER_LIMIT_S):
        raise TimeoutError(f"a reader kept a buffer for {READER_LIMIT_S} s")
    try:
        expected(channel.receive()[0], Release)
    except IntegrityError as error:
        raise ConnectionError(f"a reader sent another request before it released a buffer: {error.message}") from error
