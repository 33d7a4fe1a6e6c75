"""The segments of one node and the table of their buffers, behind one lock: opened, overwritten, pinned, freed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.checkpoint.memory.limits import available_bytes, gib
from elastic.checkpoint.memory.messages import READER_LIMIT_S
from elastic.checkpoint.memory.segments import Segment
from elastic.checkpoint.memory.server.buffer_table import BufferTable
from elastic.checkpoint.memory.shard_buffers import ShardBuffer, ShardKey, ShardShape, SnapshotRef
from elastic.checkpoint.memory.work_counter import WorkCounter
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import IntegrityError, StorageError, UsageError, Where

logger = logging.getLogger(__name__)


class SegmentPool:
    """Thread-safe. `table` may be used by holders of `changed`; a buffer that has `users` stays in place."""

    def __init__(self, limit_bytes: int | None = None, available: Callable[[], int] = available_bytes) -> None:
        """`limit_bytes` None: what `available` returns when memory is requested."""
        self.limit_bytes = limit_bytes
        self.changed = threading.Condition()
        self.table = BufferTable()
        self.work = WorkCounter()
        self._available = available
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count(1)
        self._closed = False

    @property
    def settled(self) -> SnapshotRef:
        with self.changed:
            return self.table.settled

    def open(self, key: ShardKey, shape: ShardShape, base: SnapshotRef | None = None) -> None:
        """Raises UsageError when the node lacks the memory for two buffers, Fenced when the generation is over."""
        with self.freeing():
            self.check_open()
            before = self.table.shards.get(key)
            self.table.open(key, shape, base)
            need, have = self.table.wanted_bytes(), self._room() + self._expiring_bytes()
            if need > have:
                self.table.undo_open(key, before)
                count = 2 + bool(key.stripe)
                raise UsageError(
                    f"snapshots of {key.what} need {count} x {gib(shape.nbytes)} in this node's memory, but with what "
                    f"it holds for other ranks {gib(need)} are needed and {gib(have)} are available: use "
                    "fewer ranks per node, fewer replicas or parity of more nodes, or disable snapshots in memory",
                    key.where,
                )
            self.changed.notify_all()

    def begin(self, key: ShardKey) -> ShardBuffer:
        """The buffer that is written next, with one more user. Raises StorageError when it is not free in time."""
        deadline = time.monotonic() + READER_LIMIT_S
        with self.changed:
            while (buffer := self.claim(key)) is None:
                if not self.changed.wait(deadline - time.monotonic()):
                    raise StorageError(
                        f"the next buffer has been read for {READER_LIMIT_S} s and cannot be overwritten", key.where
                    )
            return buffer

    def claim(self, key: ShardKey) -> ShardBuffer | None:
        """`begin` for holders of the lock, without waiting: None while the buffer is in use."""
        self.check_open()
        buffer = self.table.next_buffer(key)
        if buffer is None:
            nbytes = self.table.shards[key].nbytes
            buffer = self.table.add(key, self.allocate(nbytes, key.where))
        if buffer.users:
            return None
        self.table.begin(buffer)
        buffer.users += 1
        return buffer

    def find(
        self, generation: int, step: int, rank: int, replica: bool | None = None, stripe: tuple[int, ...] = ()
    ) -> ShardBuffer:
        """A complete buffer, with one more user. Raises IntegrityError when there is none."""
        with self.changed:
            buffer = self.table.find(generation, step, rank, replica, stripe)
            if buffer is None or self._closed:
                where = Where(rank=rank, step=step, generation=generation)
                raise IntegrityError("this node does not hold that shard any more", where)
            buffer.users += 1
            return buffer

    def release(self, buffer: ShardBuffer) -> None:
        with self.freeing():
            buffer.users -= 1
            self.changed.notify_all()

    def segment(self, number: int) -> Segment:
        """Of a buffer that has users, or a number that `allocate` returned."""
        return self._segments[number]

    def allocate(self, nbytes: int, where: Where) -> int:
        """The number of a new segment. Raises StorageError. The caller holds the lock."""
        have = self._room()
        if nbytes > have:
            what = f"the next snapshot needs {gib(nbytes)} of this node's memory, of which {gib(have)} are available"
            raise StorageError(f"{what} until older snapshots are freed", where)
        number = next(self._numbers)
        try:
            self._segments[number] = Segment(nbytes)
        except OSError as error:
            raise StorageError(f"{gib(nbytes)} of memory for a snapshot cannot be allocated: {error}", where) from error
        return number

    def give_back(self, number: int) -> None:
        """Free a segment that was allocated and did not become a buffer."""
        with self.changed:
            segment = self._segments.pop(number)
        segment.close()

    def settle(self, settled: SnapshotRef) -> None:
        with self.freeing():
            self.table.settle(settled)

    def held(self) -> tuple[Held, ...]:
        with self.changed:
            return self.table.held()

    def prepare(self, key: ShardKey) -> bool:
        """Do a little of the allocation work ahead of the shard's next snapshot; False when nothing is left to do."""
        with self.changed:
            buffers = [c for c in self.table.buffers.values() if c.key == key and not c.dropped and not c.users]
            rough = [buffer for buffer in buffers if self._segments[buffer.id].rough]
            if not rough:
                alone = len(buffers) == 1 and buffers[0].step is not None and self.table.room_for_more(key)
                nbytes = self.table.shards[key].nbytes if alone else 0
                if alone and self._room() >= nbytes:
                    self.table.add(key, self.allocate(nbytes, key.where))
                    return True
                return False
            buffer = rough[0]
            buffer.users += 1
        try:
            self._segments[buffer.id].populate()
        finally:
            self.release(buffer)
        return True

    def stats(self) -> dict[str, int]:
        with self.changed:
            kinds = dict.fromkeys(("own_bytes", "replica_bytes", "parity_bytes"), 0)
            for buffer in self.table.buffers.values():
                kind = "parity_bytes" if buffer.key.stripe else "replica_bytes" if buffer.key.replica else "own_bytes"
                kinds[kind] += self._segments[buffer.id].nbytes
            return {**kinds, "segments": len(self._segments), "lines": len(self.table.shards)}

    def close(self, limit_s: float = READER_LIMIT_S) -> None:
        """Free all memory; buffers in use are freed when their users are done. Idempotent."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            for buffer in self.table.buffers.values():
                buffer.dropped = True
            if not self.changed.wait_for(lambda: not any(c.users for c in self.table.buffers.values()), limit_s):
                logger.warning("memory of snapshots is still in use after %s s and was not freed", limit_s)
        with self.freeing():
            pass

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Hold the lock; afterwards, without it, free the memory of removed buffers, which takes a while."""
        gone: list[Segment] = []
        try:
            with self.changed:
                try:
                    yield
                finally:
                    gone += [self._segments.pop(number) for number in self.table.collect()]
        finally:
            for segment in gone:
                segment.close()

    def check_open(self) -> None:
        if self._closed:
            raise StorageError("this node's memory of snapshots was closed")

    def _room(self) -> int:
        segments = self._segments.values()
        if self.limit_bytes is not None:
            return self.limit_bytes - sum(segment.nbytes for segment in segments)
        return self._available() - sum(segment.unpopulated_bytes for segment in segments)

    def _expiring_bytes(self) -> int:
        return sum(self._segments[number].nbytes for number in self.table.expiring())
