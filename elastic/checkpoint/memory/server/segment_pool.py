"""The segments of one node and the table of their buffers, behind one lock: opened, overwritten, pinned, freed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
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
        # Mapped by workers that are connected; and those of them that are no buffer of any shard at present.
        self._lent: set[int] = set()
        self._spare: set[int] = set()
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
            need = self.table.wanted_bytes()
            have = self._room() + self._expiring_bytes() + sum(self._segments[number].size for number in self._spare)
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

    def begin(self, key: ShardKey, mapped: Collection[int] = ()) -> ShardBuffer:
        """The buffer that is written next, with one more user. Raises StorageError when it is not free in time.

        `mapped`: the writer has these segments mapped already.
        """
        deadline = time.monotonic() + READER_LIMIT_S
        with self.changed:
            while (buffer := self.claim(key, mapped)) is None:
                if not self.changed.wait(deadline - time.monotonic()):
                    raise StorageError(
                        f"the next buffer has been read for {READER_LIMIT_S} s and cannot be overwritten", key.where
                    )
            return buffer

    def claim(self, key: ShardKey, mapped: Collection[int] = ()) -> ShardBuffer | None:
        """`begin` for holders of the lock, without waiting: None while the buffer is in use."""
        self.check_open()
        buffer = self.table.next_buffer(key)
        if buffer is None:
            nbytes = self.table.shards[key].nbytes
            number = self._use_again(nbytes, mapped)
            buffer = self.table.add(key, self.allocate(nbytes, key.where) if number is None else number)
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

    def kept(self, key: ShardKey, mapped: Collection[int]) -> tuple[int, ...]:
        """Those of `mapped`, a worker's own segments, that its shard `key` uses or may use again."""
        with self.changed:
            return tuple(number for number in mapped if self._fits(key, number))

    def lend(self, number: int) -> None:
        """A worker maps this segment: it is not freed before `take_back`, so that it can be used again."""
        with self.changed:
            self._lent.add(number)

    def take_back(self, numbers: Iterable[int]) -> None:
        """Their worker does not have them mapped any more, or is gone."""
        with self.freeing():
            self._lent -= set(numbers)

    def settle(self, settled: SnapshotRef) -> None:
        with self.freeing():
            self.table.settle(settled)

    def held(self) -> tuple[Held, ...]:
        with self.changed:
            return self.table.held()

    def prepare(self, key: ShardKey, mapped: Collection[int] = ()) -> bool:
        """Do a little of the allocation work ahead of the shard's next snapshot; False when nothing is left to do.

        Nothing is allocated where one of `mapped` can be used again, or can be as soon as a snapshot is settled.
        """
        with self.changed:
            buffers = [c for c in self.table.buffers.values() if c.key == key and not c.dropped and not c.users]
            rough = [buffer for buffer in buffers if self._segments[buffer.id].rough]
            if not rough:
                alone = len(buffers) == 1 and buffers[0].step is not None and self.table.room_for_more(key)
                alone = alone and not any(self._fits(key, number) for number in {*mapped} - {buffers[0].id})
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
            self._lent.clear()
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
                    self._spare |= {*self.table.collect()}
                    freed, self._spare = self._spare - self._lent, self._spare & self._lent
                    gone += [self._segments.pop(number) for number in freed]
        finally:
            for segment in gone:
                segment.close()

    def check_open(self) -> None:
        if self._closed:
            raise StorageError("this node's memory of snapshots was closed")

    def _room(self) -> int:
        segments = self._segments.values()
        if self.limit_bytes is not None:
            return self.limit_bytes - sum(segment.size for segment in segments)
        return self._available() - sum(segment.unpopulated_bytes for segment in segments)

    def _expiring_bytes(self) -> int:
        return sum(self._segments[number].size for number in self.table.expiring())

    def _fits(self, key: ShardKey, number: int) -> bool:
        """Is the segment a buffer of `key`, or one that it can take over, now or when an older generation goes?"""
        if number not in self._segments:
            return False
        buffer = self.table.buffers.get(number)
        if buffer is not None and buffer.key == key:
            return True
        free = number in self._spare or (
            buffer is not None and not buffer.key.replica and buffer.key.generation < key.generation
        )
        return free and key in self.table.shards and self._segments[number].size >= self.table.shards[key].nbytes

    def _use_again(self, nbytes: int, mapped: Collection[int]) -> int | None:
        """A spare segment that its worker has mapped, the smallest that is large enough; None if there is none."""
        fitting = [number for number in mapped if number in self._spare and self._segments[number].size >= nbytes]
        number = min(fitting, key=lambda number: self._segments[number].size, default=None)
        if number is not None:
            self._spare.discard(number)
            self._segments[number].use_again(nbytes)
        return number
