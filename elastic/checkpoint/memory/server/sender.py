"""One rank's shards on their way to one other node: a thread that sends what was committed until it is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic.checkpoint.memory.records import template_to_json
from elastic.checkpoint.memory.server.node_shards import Store
from elastic.checkpoint.memory.server.transfer import send_replica, send_share
from elastic.checkpoint.memory.shard_buffers import Line, Mark
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.errors import ElasticError, Fenced, IntegrityError
from elastic.transport.channel import Channel
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Job:
    step: int
    number: int
    client: Mapping[str, Json] | None


class Sender(threading.Thread):
    """With `stripe` the target keeps the parity of these ranks' shards, without it a replica of each of this one's.

    `told` is called from this thread whenever `sent_step` or `problem` has changed.
    """

    def __init__(
        self,
        store: Store,
        template: ShardRecord,
        target: Address,
        token: bytes,
        base: Mark | None,
        stripe: Sequence[int],
        told: Callable[[], None],
    ) -> None:
        super().__init__(name=f"rank {template.rank} to {target[0]}:{target[1]}", daemon=True)
        self.sent_step = -1
        self.sent_bytes = 0
        self.problem: str | None = None
        self._store = store
        self._template = template
        self._line = Line(template.generation, template.rank, replica=False)
        self._target = target
        self._token = token
        self._base = base
        self._stripe = [*stripe]
        self._told = told
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._retiring = self._stopped = False
        self._channel: Channel | None = None

    def send(self, job: Job) -> None:
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def retire(self) -> None:
        """Ends the thread once what was committed is sent, or cannot be sent at the first try."""
        with self._changed:
            self._retiring = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread soon, in the middle of sending too. Does not wait for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            if self._channel is not None:
                self._channel.shut()

    def run(self) -> None:
        pauses = 0
        # At once and not with the first snapshot: whether the holder has the memory is to be known early.
        job: Job | None = None
        while not self._stopped:
            try:
                self._connect()
                if job is not None:
                    self._push(job)
            except (OSError, ElasticError) as error:
                self._close()
                if self._gives_up(error, pauses):
                    break
                self._pause(pauses)
                pauses += 1
            else:
                pauses = 0
                self._report(None, job)
                job = self._next(job)
                if job is None:
                    break
        self._close()

    def _connect(self) -> None:
        if self._channel is not None:
            return
        channel = connect(self._target, self._token)
        with self._changed:
            self._channel = channel
            if self._stopped:
                channel.shut()
        what = {"do": "stripe", "ranks": self._stripe} if self._stripe else {"do": "replica"}
        channel.ask({**what, "template": template_to_json(self._template), "base": self._base})

    def _push(self, job: Job) -> None:
        channel, line = self._channel, self._line
        assert channel is not None
        client = None if job.client is None else dict(job.client)
        message = {"step": job.step, "client": client, "mark": self._store.mark}
        with self._store.reading(line.generation, job.step, line.rank, replica=False) as reading:
            answer = channel.ask({"do": "share" if self._stripe else "push", **message})
            if answer.get("have"):
                return
            before = channel.sent_bytes
            if self._stripe:
                xxh3 = send_share(channel, reading.segment, int(answer["begin"]))
            else:
                xxh3 = send_replica(channel, reading.segment)
        self.sent_bytes += channel.sent_bytes - before
        self._store.hashed(job.number, job.step, xxh3)

    def _next(self, done: Job | None) -> Job | None:
        """The next job; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._retiring or self._job is not done)
            return None if self._stopped or self._job is done else self._job

    def _gives_up(self, error: Exception, pauses: int) -> bool:
        if self._stopped:
            return True
        # That generation is over, or the snapshot is: neither comes back.
        final = isinstance(error, (Fenced, IntegrityError))
        # What was idle may have been closed by the other side: only a second failure is one.
        if pauses or final:
            what = "parity" if self._stripe else "replica"
            host, port = self._target
            self._report(f"{host}:{port} takes no {what} of rank {self._line.rank}: {error}", None)
        return final or (self._retiring and pauses > 0)

    def _pause(self, pauses: int) -> None:
        if pauses:
            limit_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(pauses - 1, 10))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._retiring, limit_s)

    def _report(self, problem: str | None, job: Job | None) -> None:
        if problem is not None and self.problem is None:
            logger.warning("%s", problem)
        changed = problem != self.problem or (job is not None and job.step > self.sent_step)
        self.problem = problem
        if job is not None:
            self.sent_step = job.step
        if changed:
            self._told()

    def _close(self) -> None:
        with self._changed:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
