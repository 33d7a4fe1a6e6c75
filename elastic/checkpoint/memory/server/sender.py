"""Replication of one rank to one other node: a thread that sends each committed snapshot until it has arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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


class Sender(CommitThread):
    """The target keeps a replica of each snapshot, or with a `stripe` in the request parity of these ranks' shards."""

    def __init__(
        self,
        shards: NodeShards,
        request: OpenShard,
        target: Address,
        token: bytes,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(f"rank {request.template.rank} to {target[0]}:{target[1]}", on_change)
        self._failing_since = 0.0
        self._shards = shards
        self._request = request
        self._key = ShardKey(request.template.generation, request.template.rank, replica=False)
        self._target = target
        self._token = token
        self._channel: Channel | None = None

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
                if self._gives_up(error, pauses):
                    break
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
            if self._request.stripe:
                xxh3 = send_share(channel, reading.segment, accepted.begin)
            else:
                xxh3 = send_replica(channel, reading.segment)
        self.sent_bytes += channel.sent_bytes - before
        self._shards.hashed(job.number, job.step, xxh3)

    def _gives_up(self, error: Exception, pauses: int) -> bool:
        if self._stopped:
            return True
        # The generation is over: no later attempt can succeed. A snapshot that is dropped or damaged is one of many.
        if isinstance(error, Fenced) or (pauses and time.monotonic() - self._failing_since >= GIVE_UP_S):
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
