"""Worker-side client of the node's snapshot server: one rank's snapshots, generation by generation."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from elastic.checkpoint.memory.link import Link
from elastic.checkpoint.memory.messages import (
    BeginSnapshot,
    CommitSnapshot,
    Done,
    GivenSegment,
    Opened,
    OpenShard,
    Progress,
    SettleSnapshot,
    WorkerRequest,
    from_json,
)
from elastic.checkpoint.memory.records import check_template, extra_state_from_json
from elastic.checkpoint.memory.segments import map_segment
from elastic.checkpoint.memory.shard_buffers import SnapshotRef
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.errors import ElasticError, StorageError, UsageError
from elastic.transport.channel import checked
from elastic.transport.handshake import Address, connect

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Reconnections of one generation; a connection that breaks more often is given up.
_RECONNECTIONS = 3


class SnapshotClient:
    """Connects to the server of this node. Thread-safe, except that only one thread at a time may write snapshots.

    A broken connection is replaced by a new one, which continues where the last one was. If that fails, every call
    raises StorageError, after at most forty seconds if the server is frozen; opening the next generation tries again.
    Calls raise Fenced when a newer generation has begun on this node.

    Memory stays mapped from one generation to the next where the server can use it again: mapping many gigabytes anew,
    and pinning them for a device, takes seconds. `pin` is called with what was mapped, and what it returns before that
    is unmapped.
    """

    def __init__(
        self, local_name: str, token: bytes, pin: Callable[[memoryview], Callable[[], None]] = lambda _: lambda: None
    ) -> None:
        self._local_name = local_name
        self._token = token
        self._pin = pin
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False
        self._broken: str | None = None
        self._progress: Progress | None = None
        self._generation = self._committed = self._settled = -1
        self._maps: dict[int, mmap.mmap] = {}
        self._unpin: dict[int, Callable[[], None]] = {}
        # The segments that were given in this generation, and maps that a device may still write into.
        self._given: set[int] = set()
        self._abandoned: list[object] = []
        # Repeated on a new connection: the open shard, and the memory that is being written.
        self._opened: OpenShard | None = None
        self._writing: int | None = None
        self._reconnections = 0
        try:
            with self._asking:
                self._link = self._connect()
        except OSError as error:
            raise StorageError(f"this node's memory of snapshots cannot be reached: {error}") from error

    @property
    def node(self) -> str:
        return self._local_name

    def open(
        self,
        template: ShardRecord,
        nbytes: int,
        targets: Sequence[Address],
        base: SnapshotRef | None = None,
        stripe: Sequence[int] = (),
        spares: Sequence[Address] = (),
    ) -> None:
        """Once per generation, before its first snapshot.

        `template` is the constant part of this rank's record in the generation; `begin` of its tensors is an offset
        into the segment of `nbytes`. `targets` get a replica of each snapshot, or with `stripe` (ranks, including this
        one) keep parity of their shards; one that takes no replicas is replaced by one of `spares`. `base` is
        (generation, step) of the snapshot in memory from which this generation was restored, given once that state was
        verified: all other older snapshots are freed then. Without it older generations stay until a snapshot of this
        one is settled.

        Raises UsageError when two buffers of this shard do not fit into the node's memory with what it holds for
        others.
        """
        if template.bytes != nbytes:
            raise UsageError(f"the record of a shard says {template.bytes} bytes, but {nbytes} were requested")
        check_template(template)
        with self._changed:
            self._generation = template.generation
            self._committed = self._settled = -1
            self._progress = None
        self._opened, self._writing, self._reconnections = None, None, 0
        self._given = set()
        request = OpenShard(template, tuple(targets), base, tuple(stripe), tuple(spares), tuple(self._maps))
        try:
            answer, _ = self._ask(request, Opened)
            assert answer is not None
        except ElasticError:
            self._keep(())
            raise
        self._keep(answer.kept)
        self._opened = request

    def ready(self) -> bool:
        """True when `segment` may be called: the last committed snapshot is settled."""
        return self._committed <= self._settled

    def segment(self) -> memoryview:
        """Writable memory for the next snapshot. Its old content is invalid from now on; it is never the settled one.

        Raises IntegrityError unless `ready`: the last snapshot may be what a recovery needs.
        """
        answer, fd = self._ask(BeginSnapshot(), GivenSegment)
        # Only a commit may be left without an answer after a reconnection.
        assert answer is not None
        number, nbytes = self._mapped(answer, fd)
        self._writing = number
        return memoryview(self._maps[number])[:nbytes]

    def abandon(self) -> None:
        """What is mapped may still be written by a device: it stays mapped until the process ends, and is not used
        again."""
        with self._asking:
            self._abandoned += [self._maps, self._unpin]
            self._maps, self._unpin = {}, {}

    def commit(self, step: int, extra_state: Mapping[str, Json] | None) -> None:
        """The segment holds step `step`. Returns at once; replication continues without this process."""
        self._ask(CommitSnapshot(step, extra_state_from_json(None if extra_state is None else dict(extra_state))), Done)
        self._committed, self._writing = step, None

    def complete(self) -> int:
        """The newest step of this generation whose own snapshot and all replicas are complete; -1 if there is none.

        Raises once no later step of this generation can become complete: UsageError when a node that keeps replicas or
        parity lacks the memory, StorageError when it has failed for too long or the own server is gone.
        """
        with self._changed:
            if self._broken is not None:
                raise StorageError(self._broken)
            if self._progress is not None and self._progress.lost:
                raise (UsageError if self._progress.lacks_memory else StorageError)(str(self._progress.failed))
            return self._complete_step()

    def wait_complete(self, step: int, timeout_s: float) -> bool:
        """False if the step is not complete in time, or cannot become complete because the server is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._complete_step() >= step, timeout_s)
            return self._complete_step() >= step

    def failed(self) -> str | None:
        """Why replication does not proceed, in one sentence; None once it does again: it is retried."""
        with self._changed:
            return self._broken or (self._progress.failed if self._progress is not None else None)

    def moved(self) -> str | None:
        """Which node keeps replicas in the place of which other one, and why; None while it is none."""
        with self._changed:
            return self._progress.moved if self._progress is not None else None

    def settled(self, step: int) -> None:
        """Every rank's snapshot of `step` is complete: the server frees older ones."""
        self._ask(SettleSnapshot(step), Done)
        self._settled = max(self._settled, step)

    def stats(self) -> dict[str, float]:
        """`seconds` from commit to complete of the last snapshot, `sent_bytes` to replica holders since `open`."""
        with self._changed:
            known = self._progress
            return (
                {"seconds": known.seconds, "sent_bytes": known.sent_bytes} if known else {"seconds": 0, "sent_bytes": 0}
            )

    def close(self) -> None:
        """Committed snapshots stay with the node and are still sent. Idempotent."""
        self._closed = True
        self._link.end("it was closed")
        self._gone("it was closed")
        self._link.join()
        self._keep(())

    def _ask(self, request: WorkerRequest, kind: type[_T]) -> tuple[_T | None, int | None]:
        """The answer and its descriptor. The answer is None where a commit had arrived and only its answer was lost."""
        with self._asking:
            writing, answer = self._writing, self._link.ask(request)
            if answer is None and self._reconnected():
                if writing != self._writing:
                    return None, None
                answer = self._link.ask(request)
            if answer is None:
                self._gone(self._link.broken or "")
                raise StorageError(f"this node's memory of snapshots is gone: {self._broken}")
            return from_json(checked(answer[0]), kind), answer[1]

    def _lost(self, link: Link) -> None:
        """On the connection's own thread. If a request is in progress, the requesting thread reconnects instead."""
        with self._asking:
            if link is self._link and not self._reconnected():
                self._gone(link.broken or "")
            link.close()

    def _connect(self) -> Link:
        return Link(connect(self._local_name, self._token), self._update, self._lost)

    def _reconnected(self) -> bool:
        """Reconnect and continue where the last connection was. The caller holds `_asking`."""
        if self._closed or self._reconnections >= _RECONNECTIONS:
            return False
        why, self._reconnections = self._link.broken, self._reconnections + 1
        try:
            self._link = self._connect()
            self._resume()
        except (OSError, ElasticError) as error:
            self._reconnections = _RECONNECTIONS
            self._link.end("the client gave it up")
            self._gone(f"{why}, and reconnecting failed: {error}")
            return False
        logger.warning("reconnected to this node's memory of snapshots: %s", why)
        with self._changed:
            self._broken = None
        return True

    def _resume(self) -> None:
        """Raises OSError or ElasticError if the server cannot continue from there."""
        if self._opened is None:
            return
        opened, _ = self._answer(replace(self._opened, mapped=tuple(self._maps)), Opened)
        self._keep(opened.kept)
        if self._writing is not None and opened.step > self._committed:
            self._writing = None
        elif self._writing is not None:
            given = self._answer(BeginSnapshot(), GivenSegment)
            if self._mapped(*given)[0] != self._writing:
                raise StorageError("the server gave other memory than what this worker was writing")

    def _answer(self, request: WorkerRequest, kind: type[_T]) -> tuple[_T, int | None]:
        answer = self._link.ask(request)
        if answer is None:
            raise ConnectionError(self._link.broken)
        return from_json(checked(answer[0]), kind), answer[1]

    def _mapped(self, given: GivenSegment, fd: int | None) -> tuple[int, int]:
        """Number and size of the memory for the next snapshot, after it was mapped into this process."""
        if fd is not None:
            try:
                # A new connection assigns the same memory again, and a copy into it may be running.
                if given.number not in self._maps:
                    mapped = self._maps[given.number] = map_segment(fd, given.nbytes)
                    self._unpin[given.number] = self._pin(memoryview(mapped))
            finally:
                os.close(fd)
        self._given.add(given.number)
        if len(self._given) == 2:
            # As the server does: what is left of older generations is not needed.
            self._keep(self._given)
        return given.number, given.nbytes

    def _keep(self, numbers: Collection[int]) -> None:
        """Unmap all others."""
        for number in [number for number in self._maps if number not in numbers]:
            self._unpin.pop(number)()
            # Whoever still reads it keeps it alive.
            del self._maps[number]

    def _over(self) -> bool:
        """No later step of this generation can become complete."""
        return self._broken is not None or (self._progress is not None and self._progress.lost)

    def _complete_step(self) -> int:
        return self._progress.complete_step if self._progress is not None else -1

    def _update(self, progress: Progress) -> None:
        with self._changed:
            # A report that was in transit when a new generation was opened belongs to the old one.
            if progress.generation == self._generation:
                # A new connection starts from -1 again.
                self._progress = replace(progress, complete_step=max(progress.complete_step, self._complete_step()))
                self._changed.notify_all()

    def _gone(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or f"this node's memory of snapshots cannot be reached: {reason}"
            self._changed.notify_all()
