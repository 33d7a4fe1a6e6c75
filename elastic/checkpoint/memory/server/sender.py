"""Replication of one rank to one other node: a thread that sends each committed snapshot until it has arrived."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from elastic.checkpoint.memory.messages import (
    Accepted,
    OpenParity,
    OpenReplica,
    OpenShard,
    PushReplica,
    PushShare,
    from_json,
    request_to_json,
)
from elastic.checkpoint.memory.server.commit_thread import CommitThread, Job
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.server.transfer import send_replica, send_share
from elastic.checkpoint.memory.shard_buffers import ShardKey
from elastic.core.errors import ElasticError, Fenced, UsageError
from elastic.transport.channel import Channel
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
# A target that has failed for this long is given up for this generation. Longer than detecting a node's loss takes.
GIVE_UP_S = 30.0
# Where another node could take its place, a target that takes a snapshot more slowly has failed.
_SLOWEST_BYTES_S = 20e6


class Spares:
    """Nodes that may take the place of one that takes no replicas, for all senders of a rank."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._left = deque(addresses)

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self) -> Address | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None


class Sender(CommitThread):
    """The target keeps a replica of each snapshot, or with a `stripe` in the request parity of these ranks' shards.

    A target that takes no replicas is replaced by a spare one; without one, replication is given up for the generation.
    """

    def __init__(
        self,
        shards: NodeShards,
        request: OpenShard,
        target: Address,
        token: bytes,
        on_change: Callable[[], None],
        spares: Spares,
    ) -> None:
        super().__init__(f"rank {request.template.rank} to {target[0]}:{target[1]}", on_change)
        self._failing_since = 0.0
        self._shards = shards
        self._request = request
        self._key = ShardKey(request.template.generation, request.template.rank, replica=False)
        self._target = target
        self._token = token
        self._channel: Channel | None = None
        self._spares = spares
        self._too_slow = False

    def _interrupt(self) -> None:
        """Also interrupts a transfer."""
        if self._channel is not None:
            self._channel.shut()

    def _work(self) -> None:
        try:
            self._send_all()
        finally:
            self._close()

    def _send_all(self) -> None:
        pauses = 0
        # Connect before the first snapshot: a holder that lacks the memory is reported early.
        job: Job | None = None
        while not self._stopped:
            try:
                self._connect()
                if job is not None:
                    self._push(job)
            except (OSError, ElasticError) as error:
                self._close()
                if not pauses:
                    self._failing_since = time.monotonic()
                if self._has_failed(pauses) and self._moves(str(error)):
                    pauses = 0
                elif self._gives_up(error, pauses):
                    break
                else:
                    self._pause(pauses)
                    pauses += 1
                with self._changed:
                    # A newer snapshot replaces one that cannot be sent.
                    job = self._job
            else:
                pauses = 0
                self._report(None, job)
                job = self._next(job)
                if job is None:
                    break

    def _connect(self) -> None:
        if self._channel is not None:
            return
        channel = connect(self._target, self._token)
        with self._changed:
            self._channel = channel
            if self._stopped:
                channel.shut()
        template, base, stripe = self._request.template, self._request.base, self._request.stripe
        channel.ask(request_to_json(OpenParity(stripe, template, base) if stripe else OpenReplica(template, base)))

    def _push(self, job: Job) -> None:
        channel, key = self._channel, self._key
        assert channel is not None
        extra_state = None if job.extra_state is None else dict(job.extra_state)
        kind = PushShare if self._request.stripe else PushReplica
        push = kind(job.step, extra_state, self._shards.settled)
        with self._shards.reading(key.generation, job.step, key.rank, replica=False) as reading:
            accepted = from_json(channel.ask(request_to_json(push)), Accepted)
            if accepted.have:
                return
            before = channel.sent_bytes
            with self._limited(channel, reading.segment.nbytes):
                if self._request.stripe:
                    xxh3 = send_share(channel, reading.segment, accepted.begin)
                else:
                    xxh3 = send_replica(channel, reading.segment)
        self.sent_bytes += channel.sent_bytes - before
        self._shards.hashed(job.number, job.step, xxh3)

    @contextmanager
    def _limited(self, channel: Channel, nbytes: int) -> Iterator[None]:
        """Where there is a spare target, a transfer that takes too long fails although something moves all the time."""
        timer = threading.Timer(GIVE_UP_S + nbytes / _SLOWEST_BYTES_S, self._stop_slow, (channel,))
        if self._spares:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _stop_slow(self, channel: Channel) -> None:
        self._too_slow = True
        channel.shut()

    def _has_failed(self, pauses: int) -> bool:
        late = pauses > 0 and time.monotonic() - self._failing_since >= GIVE_UP_S
        return self._too_slow or late

    def _moves(self, why: str) -> bool:
        """Whether a spare node takes the target's place. Not when the generation is over."""
        if self._stopped or self._retiring or (spare := self._spares.take()) is None:
            return False
        why = "it takes it too slowly" if self._too_slow else why
        self.moved = f"{self._refusal(why)}; {spare[0]}:{spare[1]} keeps it instead"
        logger.warning("%s", self.moved)
        self._target, self._too_slow, self.problem = spare, False, None
        self._on_change()
        return True

    def _gives_up(self, error: Exception, pauses: int) -> bool:
        if self._stopped:
            return True
        # The generation is over: no later attempt can succeed. A snapshot that is dropped or damaged is one of many.
        if isinstance(error, Fenced) or self._has_failed(pauses):
            self.lost, self.lacks_memory = True, isinstance(error, UsageError)
        # The other side may have closed an idle connection: only a second failure in a row counts.
        if pauses or self.lost:
            self._report(self._refusal(str(error)), None)
        return self.lost or (self._retiring and pauses > 0)

    def _refusal(self, why: str) -> str:
        what = "parity" if self._request.stripe else "replica"
        host, port = self._target
        return f"{host}:{port} accepts no {what} of rank {self._key.rank}: {why}"

    def _pause(self, pauses: int) -> None:
        if pauses:
            limit_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(pauses - 1, 10))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._retiring, limit_s)

    def _report(self, problem: str | None, job: Job | None) -> None:
        if problem is not None and self.problem is None:
            logger.warning("%s", problem)
        changed = self.lost or problem != self.problem or (job is not None and job.step > self.sent_step)
        self.problem = problem
        if job is not None:
            self.sent_step = job.step
        if changed:
            self._on_change()

    def _close(self) -> None:
        with self._changed:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
