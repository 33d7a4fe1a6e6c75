"""What a connection may ask of a node's server: one thread each, one request at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from elastic.checkpoint.memory.records import client_state, template_from_json
from elastic.checkpoint.memory.server.node_shards import Store
from elastic.checkpoint.memory.server.parity import Parity
from elastic.checkpoint.memory.server.replication import Progress, Replication
from elastic.checkpoint.memory.server.segment_pool import READER_LIMIT_S, Shelf
from elastic.checkpoint.memory.server.sender import Job
from elastic.checkpoint.memory.server.transfer import receive_share
from elastic.checkpoint.memory.shard_buffers import Line, Mark
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import ElasticError, IntegrityError
from elastic.transport.channel import Channel, Message, checked, error_message
from elastic.transport.handshake import Address

logger = logging.getLogger(__name__)

_IDLE_S = 30.0

Replicate = Callable[[ShardRecord, list[Address], Mark | None, list[int], Callable[[Progress], None]], Replication]


class LocalSession:
    """A worker of this node, over the Unix socket. Messages in, `{"answer": ...}` and `{"progress": ...}` out."""

    def __init__(self, shelf: Shelf, channel: Channel, replicate: Replicate) -> None:
        self._shelf = shelf
        self._store = Store(shelf)
        self._channel = channel
        self._replicate = replicate
        self._replication: Replication | None = None
        self._line: Line | None = None
        self._given: set[int] = set()
        self._writing: int | None = None
        # Progress is told by the threads that send replicas.
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Until the worker closes the connection or is gone: raises OSError then."""
        try:
            while True:
                _wait(self._channel, self._shelf, self._line)
                message, _ = self._channel.receive()
                try:
                    self._handle(message)
                except ElasticError as error:
                    self._answer(error_message(error))
        finally:
            # What was committed is complete on this node: it is sent although the worker is gone.
            if self._replication is not None:
                self._replication.retire()

    def _handle(self, message: Message) -> None:
        what = message.get("do")
        if what == "open":
            self._open(message)
        elif what == "begin":
            self._begin()
        elif what == "commit":
            self._commit(int(message["step"]), client_state(message.get("client")))
        elif what == "settled":
            self._shelf.settle((self._own_line().generation, int(message["step"])))
            self._answer({})
        elif what == "lease":
            self._lease(message)
        else:
            raise IntegrityError(f"a worker asked for {what!r}, which this version does not know")

    def _open(self, message: Message) -> None:
        template = template_from_json(message["template"])
        line = Line(template.generation, template.rank, replica=False)
        base = mark_from(message.get("base"))
        self._store.open(line, template, base)
        self._line, self._writing = line, None
        if self._replication is not None:
            self._replication.stop()
        targets = [(str(host), int(port)) for host, port in message["targets"]]
        stripe = [int(rank) for rank in message.get("stripe", ())]
        self._replication = self._replicate(template, targets, base, stripe, self._tell)
        newest = self._store.newest(line)
        if newest is not None:
            # The worker has connected anew: what it had committed may not have been sent, or not told.
            self._replication.commit(Job(*newest))
        self._answer({"step": newest[0] if newest is not None else -1})

    def _begin(self) -> None:
        with self._store.writing(self._own_line()) as (number, segment):
            fresh = number not in self._given
            self._given.add(number)
            self._writing = number
            self._answer({"number": number, "nbytes": segment.nbytes}, segment.fd if fresh else None)

    def _commit(self, step: int, client: dict[str, Any] | None) -> None:
        line, number = self._own_line(), self._writing
        if number is None or self._replication is None:
            raise IntegrityError(f"step {step} was committed without memory having been asked for")
        self._store.commit(line, number, step, client)
        self._writing = None
        self._answer({})
        self._replication.commit(Job(step, number, client))

    def _lease(self, message: Message) -> None:
        with self._store.reading(*_wanted(message)) as reading:
            fd = reading.segment.reader_fd()
            try:
                self._answer({"nbytes": reading.segment.nbytes}, fd)
            finally:
                os.close(fd)
            _await_reader(self._channel)
        # Only this makes what was read valid: the copy was in place until now.
        self._answer({})

    def _own_line(self) -> Line:
        if self._line is None:
            raise IntegrityError("a worker asked for memory before it had said for which shard")
        return self._line

    def _answer(self, answer: Message, fd: int | None = None) -> None:
        with self._sending:
            self._channel.send({"answer": answer}, fd)

    def _tell(self, progress: Progress) -> None:
        try:
            with self._sending:
                self._channel.send({"progress": asdict(progress)})
        except OSError:
            self._channel.shut()  # the worker is gone, which `serve` then sees


class PeerSession:
    """Another node's server that sends replicas or what parity is made of, or a worker of another node that reads."""

    def __init__(self, shelf: Shelf, parity: Parity, channel: Channel, received: Callable[[int], None]) -> None:
        self._shelf = shelf
        self._store = Store(shelf)
        self._parity = parity
        self._channel = channel
        self._received = received
        self._line: Line | None = None
        self._rank = -1

    def serve(self) -> None:
        """Until the other side closes the connection or is gone: raises OSError then."""
        while True:
            _wait(self._channel, self._shelf, self._line)
            message, _ = self._channel.receive()
            try:
                self._handle(message)
            except ElasticError as error:
                self._channel.send(error_message(error))

    def _handle(self, message: Message) -> None:
        what = message.get("do")
        if what == "replica":
            template = template_from_json(message["template"])
            line = Line(template.generation, template.rank, replica=True)
            self._store.open(line, template, mark_from(message.get("base")))
            self._line, self._rank = line, template.rank
            self._channel.send({})
        elif what == "stripe":
            template = template_from_json(message["template"])
            ranks = [int(rank) for rank in message["ranks"]]
            self._line = self._parity.open(ranks, template, mark_from(message.get("base")))
            self._rank = template.rank
            self._channel.send({})
        elif what == "push":
            self._push(message)
        elif what == "share":
            self._share(message)
        elif what == "read":
            self._read(message)
        else:
            raise IntegrityError(f"a peer asked for {what!r}, which this version does not know")

    def _begin(self, message: Message, stripe: bool) -> tuple[Line, int, dict[str, Any] | None]:
        if self._line is None or bool(self._line.stripe) != stripe:
            raise IntegrityError("a shard came before it was said which one it is")
        mark = mark_from(message.get("mark"))
        if mark is not None:
            self._shelf.settle(mark)
        return self._line, int(message["step"]), client_state(message.get("client"))

    def _push(self, message: Message) -> None:
        line, step, client = self._begin(message, stripe=False)
        if self._store.has(line, step):
            # The connection broke between the last byte and the answer.
            self._channel.send({"have": True})
            return
        with self._store.receiving(line) as receiving:
            self._channel.send({})
            self._channel.recv_into([receiving.view])
            trailer = checked(self._channel.receive()[0])
            self._store.finish(receiving, step, client, str(trailer["xxh3"]))
            received = len(receiving.view)
        self._received(received)
        self._channel.send({})

    def _share(self, message: Message) -> None:
        line, step, client = self._begin(message, stripe=True)
        with self._parity.contributing(line, self._rank, step, client) as share:
            if share is None or share.done:
                self._channel.send({"have": True})
                return
            self._channel.send({"begin": share.begin})
            self._received(receive_share(self._channel, share))
        self._channel.send({})

    def _read(self, message: Message) -> None:
        with self._store.reading(*_wanted(message)) as reading:
            parts = [(int(begin), int(count)) for begin, count in message["parts"]]
            for begin, count in parts:
                if begin < 0 or count < 0 or begin + count > reading.segment.nbytes:
                    raise IntegrityError(f"bytes [{begin}, {begin + count}) are not in {reading.segment.nbytes}")
            self._channel.cork(True)
            self._channel.send({})
            for begin, count in parts:
                self._channel.send_file(reading.segment.fd, begin, count)
            self._channel.cork(False)
            _await_reader(self._channel)
        self._channel.send({})


def mark_from(value: Any) -> Mark | None:
    if value is None:
        return None
    generation, step = value
    return int(generation), int(step)


def _wanted(message: Message) -> tuple[int, int, int]:
    return int(message["generation"]), int(message["step"]), int(message["rank"])


def _wait(channel: Channel, shelf: Shelf, line: Line | None) -> None:
    """Until the next request; meanwhile the memory that the next snapshots need is made ready."""
    while channel.idle(0 if line is not None and shelf.prepare(line) else _IDLE_S):
        pass


def _await_reader(channel: Channel) -> None:
    if channel.idle(READER_LIMIT_S):
        raise TimeoutError(f"a reader kept a copy for {READER_LIMIT_S} s")
    if channel.receive()[0].get("do") != "release":
        raise ConnectionError("a reader went on without letting go of a copy")
