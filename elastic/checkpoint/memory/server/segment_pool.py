"""The memory of one node and the books about it, behind one lock: what is opened, overwritten, kept in place, freed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.checkpoint.memory.limits import available_bytes, gib
from elastic.checkpoint.memory.segments import Segment
from elastic.checkpoint.memory.server.buffer_table import Books
from elastic.checkpoint.memory.shard_buffers import Copy, Line, Mark, Shape
from elastic.checkpoint.memory.work_counter import Pace
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import IntegrityError, StorageError, UsageError, Where

logger = logging.getLogger(__name__)

# A reader that takes longer than this to let go of a copy is not waited for.
READER_LIMIT_S = 20.0


class Shelf:
    """Thread-safe. `books` may be used by whoever holds `changed`; a copy that has `users` stays in place."""

    def __init__(self, limit_bytes: int | None = None, available: Callable[[], int] = available_bytes) -> None:
        """`limit_bytes` None: what `available` says when memory is asked for."""
        self.limit_bytes = limit_bytes
        self.changed = threading.Condition()
        self.books = Books()
        self.pace = Pace()
        self._available = available
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count(1)
        self._closed = False

    @property
    def mark(self) -> Mark:
        with self.changed:
            return self.books.mark

    def open(self, line: Line, shape: Shape, base: Mark | None = None) -> None:
        """Raises UsageError when the node lacks the memory for two copies, Fenced when the generation is over."""
        with self.freeing():
            self.check_open()
            before = self.books.lines.get(line)
            self.books.open(line, shape, base)
            need, have = self.books.wanted_bytes(), self._room() + self._passing_bytes()
            if need > have:
                self.books.forget(line, before)
                count = 2 + bool(line.stripe)
                raise UsageError(
                    f"snapshots of {line.what} need {count} x {gib(shape.nbytes)} in this node's memory, but with what "
                    f"it holds for other ranks {gib(need)} are needed and {gib(have)} can be had: use "
                    "fewer ranks per node, fewer replicas or parity of more nodes, or go without snapshots in memory",
                    line.where,
                )
            self.changed.notify_all()

    def begin(self, line: Line) -> Copy:
        """The copy that is written next, with one more user. Raises StorageError when it is not free in time."""
        deadline = time.monotonic() + READER_LIMIT_S
        with self.changed:
            while (copy := self.claim(line)) is None:
                if not self.changed.wait(deadline - time.monotonic()):
                    raise StorageError(f"a copy that is to be overwritten is read for {READER_LIMIT_S} s", line.where)
            return copy

    def claim(self, line: Line) -> Copy | None:
        """`begin` for holders of the lock, without waiting: None while the copy is in use."""
        self.check_open()
        copy = self.books.choose(line)
        if copy is None:
            nbytes = self.books.lines[line].nbytes
            copy = self.books.add(line, self.allocate(nbytes, line.where))
        if copy.users:
            return None
        self.books.begin(copy)
        copy.users += 1
        return copy

    def find(
        self, generation: int, step: int, rank: int, replica: bool | None = None, stripe: tuple[int, ...] = ()
    ) -> Copy:
        """A complete copy, with one more user. Raises IntegrityError when there is none."""
        with self.changed:
            copy = self.books.find(generation, step, rank, replica, stripe)
            if copy is None or self._closed:
                where = Where(rank=rank, step=step, generation=generation)
                raise IntegrityError("this node does not hold that shard any more", where)
            copy.users += 1
            return copy

    def let_go(self, copy: Copy) -> None:
        with self.freeing():
            copy.users -= 1
            self.changed.notify_all()

    def segment(self, number: int) -> Segment:
        """Of a copy that has users, or that `allocate` has given a number for."""
        return self._segments[number]

    def allocate(self, nbytes: int, where: Where) -> int:
        """The number of new memory. Raises StorageError. For holders of the lock."""
        have = self._room()
        if nbytes > have:
            what = f"the next snapshot needs {gib(nbytes)} of this node's memory, of which {gib(have)} can be had"
            raise StorageError(f"{what} until older snapshots may go", where)
        number = next(self._numbers)
        try:
            self._segments[number] = Segment(nbytes)
        except OSError as error:
            raise StorageError(f"{gib(nbytes)} of memory for a snapshot cannot be had: {error}", where) from error
        return number

    def give_back(self, number: int) -> None:
        """Memory that was allocated and did not become a copy."""
        with self.changed:
            segment = self._segments.pop(number)
        segment.close()

    def settle(self, mark: Mark) -> None:
        with self.freeing():
            self.books.settle(mark)

    def held(self) -> tuple[Held, ...]:
        with self.changed:
            return self.books.held()

    def prepare(self, line: Line) -> bool:
        """A little of the work that the line's next snapshot need not wait for then; False when there is none."""
        with self.changed:
            copies = [c for c in self.books.copies.values() if c.line == line and not c.dropped and not c.users]
            rough = [copy for copy in copies if self._segments[copy.id].rough]
            if not rough:
                alone = len(copies) == 1 and copies[0].step is not None and self.books.room_for_more(line)
                nbytes = self.books.lines[line].nbytes if alone else 0
                if alone and self._room() >= nbytes:
                    self.books.add(line, self.allocate(nbytes, line.where))
                    return True
                return False
            copy = rough[0]
            copy.users += 1
        try:
            self._segments[copy.id].populate()
        finally:
            self.let_go(copy)
        return True

    def stats(self) -> dict[str, int]:
        with self.changed:
            kinds = dict.fromkeys(("own_bytes", "replica_bytes", "parity_bytes"), 0)
            for copy in self.books.copies.values():
                kind = "parity_bytes" if copy.line.stripe else "replica_bytes" if copy.line.replica else "own_bytes"
                kinds[kind] += self._segments[copy.id].nbytes
            return {**kinds, "segments": len(self._segments), "lines": len(self.books.lines)}

    def close(self, limit_s: float = READER_LIMIT_S) -> None:
        """Gives all memory back, that in use when its users are done. Idempotent."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
            for copy in self.books.copies.values():
                copy.dropped = True
            if not self.changed.wait_for(lambda: not any(c.users for c in self.books.copies.values()), limit_s):
                logger.warning("memory of snapshots is still in use %s s after it should have gone", limit_s)
        with self.freeing():
            pass

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Under the lock; afterwards the memory of copies that are gone is given back, which takes a while."""
        gone: list[Segment] = []
        try:
            with self.changed:
                try:
                    yield
                finally:
                    gone += [self._segments.pop(number) for number in self.books.sweep()]
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

    def _passing_bytes(self) -> int:
        return sum(self._segments[number].nbytes for number in self.books.passing())
