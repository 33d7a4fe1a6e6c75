"""One shard's way to one replica holder: a thread that sends what was committed, and tries again where it cannot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xxhash

from elastic.checkpoint.memory.books import Line, Mark
from elastic.checkpoint.memory.records import template_to_json
from elastic.checkpoint.memory.store import Store
from elastic.checkpoint.memory.wire import Address, Channel, connect
from elastic.core.errors import ElasticError, Fenced, IntegrityError
from elastic.core.manifest import Json, ShardRecord

logger = logging.getLogger(__name__)

# Hashed and then sent while it is still in the core's cache.
_CHUNK_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Job:
    step: int
    number: int
    client: Mapping[str, Json] | None


class Sender(threading.Thread):
    """`told` is called from this thread whenever `sent_step` or `problem` has changed."""

    def __init__(
        self,
        store: Store,
        template: ShardRecord,
        target: Address,
        token: bytes,
        base: Mark | None,
        told: Callable[[], None],
    ) -> None:
        super().__init__(name=f"replica of rank {template.rank} to {target[0]}:{target[1]}", daemon=True)
        self.sent_step = -1
        self.sent_bytes = 0
        self.problem: str | None = None
        self._store = store
        self._template = template
        self._line = Line(template.generation, template.rank, replica=False)
        self._target = target
        self._token = token
        self._base = base
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
        channel.ask({"do": "replica", "template": template_to_json(self._template), "base": self._base})

    def _push(self, job: Job) -> None:
        channel, line = self._channel, self._line
        assert channel is not None
        with self._store.reading(line.generation, job.step, line.rank, replica=False) as reading:
            client = None if job.client is None else dict(job.client)
            answer = channel.ask({"do": "push", "step": job.step, "client": client, "mark": self._store.mark})
            if answer.get("have"):
                return
            xxh3 = xxhash.xxh3_64()
            segment = reading.segment
            with segment.map() as view:
                for at in range(0, segment.nbytes, _CHUNK_BYTES):
                    with view[at : at + _CHUNK_BYTES] as chunk:
                        xxh3.update(chunk)
                        channel.send_file(segment.fd, at, len(chunk))
            channel.ask({"xxh3": xxh3.hexdigest()})
        self.sent_bytes += segment.nbytes
        self._store.hashed(job.number, job.step, xxh3.hexdigest())

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
            host, port = self._target
            self._report(f"{host}:{port} takes no replica of rank {self._line.rank}: {error}", None)
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
