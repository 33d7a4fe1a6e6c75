"""The copies that one node holds: the books and the memory that they are about, behind one lock."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import xxhash

from elastic.checkpoint.memory.books import Books, Copy, Line, Mark, Shape
from elastic.checkpoint.memory.limits import available_bytes, gib
from elastic.checkpoint.memory.segments import Segment
from elastic.checkpoint.words import piece_digests
from elastic.core.errors import IntegrityError, StorageError, UsageError, Where
from elastic.core.manifest import Json, ShardRecord
from elastic.core.manifest_json import ITEM_BYTES
from elastic.core.snapshots import Held

logger = logging.getLogger(__name__)

# A reader that takes longer than this to let go of a copy is not waited for.
READER_LIMIT_S = 20.0


@dataclass(frozen=True)
class Content:
    """What was said of a copy's bytes when they were complete. `xxh3` is empty while nobody has computed it."""

    client: Mapping[str, Json] | None
    xxh3: str


class Store:
    """Thread-safe. Whoever uses a copy's memory does so inside `reading` or `receiving`, which keep it in place."""

    def __init__(self, limit_bytes: int | None = None, available: Callable[[], int] = available_bytes) -> None:
        self._limit_bytes = limit_bytes
        self._available = available
        self._changed = threading.Condition()
        self._books = Books()
        self._templates: dict[Line, ShardRecord] = {}
        self._segments: dict[int, Segment] = {}
        self._contents: dict[int, Content] = {}
        self._records: dict[int, ShardRecord] = {}
        self._numbers = itertools.count(1)
        self._closed = False

    @property
    def mark(self) -> Mark:
        with self._changed:
            return self._books.mark

    def open(self, line: Line, template: ShardRecord, base: Mark | None = None) -> None:
        """Raises UsageError when the node lacks the memory for two copies, Fenced when the generation is over."""
        with self._freeing():
            self._check_open()
            self._books.open(line, Shape(template.world_size, template.bytes), base)
            self._templates[line] = template
            need, have = self._books.wanted_bytes(), self._room() + self._passing_bytes()
            if need > have:
                self._books.forget(line)
                what = "replica of rank" if line.replica else "rank"
                raise UsageError(
                    f"snapshots of {what} {line.rank} need 2 x {gib(template.bytes)} in this node's memory, but with "
                    f"what it holds for other ranks {gib(need)} are needed and {gib(have)} can be had: use fewer ranks "
                    "per node, fewer replicas, or go without snapshots in memory",
                    Where(rank=line.rank, generation=line.generation),
                )

    @contextmanager
    def writing(self, line: Line) -> Iterator[tuple[int, Segment]]:
        """The copy that the rank's own worker writes next; what it held is invalid from now on.

        The worker writes after this is left: what must stay in place until then is the descriptor it is given.
        """
        copy = self._begin(line)
        try:
            yield copy.id, self._segments[copy.id]
        finally:
            self._let_go(copy)

    def commit(self, line: Line, number: int, step: int, client: Mapping[str, Json] | None) -> None:
        """The copy holds the snapshot of that step, complete."""
        with self._changed:
            copy = self._books.copies.get(number)
            if copy is None or copy.line != line:
                raise IntegrityError(f"step {step} was committed in memory that was not given out for it", _of(line))
            self._books.complete(copy, step)
            self._contents[number] = Content(client, "")

    @contextmanager
    def receiving(self, line: Line) -> Iterator[Receiving]:
        """A replica's memory, to be filled. It counts only once `finish` was called."""
        copy = self._begin(line)
        try:
            with self._segments[copy.id].map() as view:
                yield Receiving(copy, view)
        finally:
            self._let_go(copy)

    def finish(self, receiving: Receiving, step: int, client: Mapping[str, Json] | None, xxh3: str) -> None:
        """Every byte has arrived. Raises Fenced when the generation ended meanwhile."""
        with self._changed:
            self._books.complete(receiving.copy, step)
            self._contents[receiving.copy.id] = Content(client, xxh3)

    @contextmanager
    def reading(self, generation: int, step: int, rank: int, replica: bool | None = None) -> Iterator[Reading]:
        """A complete copy, kept in place meanwhile. Raises IntegrityError when there is none."""
        with self._changed:
            copy = self._books.find(generation, step, rank, replica)
            if copy is None or self._closed:
                where = Where(rank=rank, step=step, generation=generation)
                raise IntegrityError("this node does not hold that shard any more", where)
            copy.users += 1
        try:
            yield Reading(copy, self._segments[copy.id], self._contents[copy.id])
        finally:
            self._let_go(copy)

    def hashed(self, number: int, step: int, xxh3: str) -> None:
        """The hash of a complete copy's bytes, computed while they were sent."""
        with self._changed:
            copy = self._books.copies.get(number)
            if copy is not None and copy.step == step:
                self._contents[number] = replace(self._contents[number], xxh3=xxh3)

    def has(self, line: Line, step: int) -> bool:
        with self._changed:
            return self._books.find(line.generation, step, line.rank, line.replica) is not None

    def settle(self, mark: Mark) -> None:
        with self._freeing():
            self._books.settle(mark)

    def held(self) -> tuple[Held, ...]:
        with self._changed:
            return self._books.held()

    def record(self, held: Held, digests: bool) -> ShardRecord:
        """See `MemoryServer.record`."""
        with self.reading(held.generation, held.step, held.rank, held.replica) as reading:
            template = self._templates[reading.copy.line]
            known = self._records.get(reading.copy.id)
            if known is None or known.step != held.step:
                content = reading.content
                known = replace(template, step=held.step, client=content.client, xxh3=content.xxh3)
                if digests:
                    known = _checked(known, reading)
                    self._records[reading.copy.id] = known
            return known

    def prepare(self, line: Line) -> bool:
        """A little of the work that the line's next snapshot need not wait for then; False when there is none."""
        with self._changed:
            copies = [c for c in self._books.copies.values() if c.line == line and not c.dropped and not c.users]
            rough = [copy for copy in copies if self._segments[copy.id].rough]
            if not rough:
                alone = len(copies) == 1 and copies[0].step is not None and self._books.room_for_more(line)
                if alone and self._room() >= self._templates[line].bytes:
                    self._allocate(line)
                    return True
                return False
            copy = rough[0]
            copy.users += 1
        try:
            self._segments[copy.id].populate()
        finally:
            self._let_go(copy)
        return True

    def stats(self) -> dict[str, int]:
        with self._changed:
            by_kind = {False: 0, True: 0}
            for copy in self._books.copies.values():
                by_kind[copy.line.replica] += self._segments[copy.id].nbytes
            return {
                "own_bytes": by_kind[False],
                "replica_bytes": by_kind[True],
                "segments": len(self._segments),
                "lines": len(self._books.lines),
            }

    def close(self, limit_s: float = READER_LIMIT_S) -> None:
        """Gives all memory back, that in use when its users are done. Idempotent."""
        with self._changed:
            self._closed = True
            for copy in self._books.copies.values():
                copy.dropped = True
            if not self._changed.wait_for(lambda: not any(c.users for c in self._books.copies.values()), limit_s):
                logger.warning("memory of snapshots is still in use %s s after it should have gone", limit_s)
        with self._freeing():
            pass

    def _begin(self, line: Line) -> Copy:
        deadline = time.monotonic() + READER_LIMIT_S
        with self._changed:
            while True:
                self._check_open()
                copy = self._books.choose(line)
                if copy is None:
                    copy = self._allocate(line)
                if not copy.users:
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise StorageError(f"a copy that is to be overwritten is read for {READER_LIMIT_S} s", _of(line))
            self._books.begin(copy)
            self._contents.pop(copy.id, None)
            self._records.pop(copy.id, None)
            copy.users += 1
            return copy

    def _allocate(self, line: Line) -> Copy:
        nbytes, have = self._templates[line].bytes, self._room()
        if nbytes > have:
            what = f"the next snapshot needs {gib(nbytes)} of this node's memory, of which {gib(have)} can be had"
            raise StorageError(f"{what} until older snapshots may go", _of(line))
        number = next(self._numbers)
        try:
            self._segments[number] = Segment(nbytes)
        except OSError as error:
            raise StorageError(f"{gib(nbytes)} of memory for a snapshot cannot be had: {error}", _of(line)) from error
        return self._books.add(line, number)

    def _room(self) -> int:
        segments = self._segments.values()
        if self._limit_bytes is not None:
            return self._limit_bytes - sum(segment.nbytes for segment in segments)
        return self._available() - sum(segment.unpopulated_bytes for segment in segments)

    def _passing_bytes(self) -> int:
        return sum(self._segments[number].nbytes for number in self._books.passing())

    def _let_go(self, copy: Copy) -> None:
        with self._freeing():
            copy.users -= 1
            self._changed.notify_all()

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        """Under the lock; afterwards the memory of copies that are gone is given back, which takes a while."""
        gone: list[Segment] = []
        try:
            with self._changed:
                try:
                    yield
                finally:
                    for number in self._books.sweep():
                        gone.append(self._segments.pop(number))
                        self._contents.pop(number, None)
                        self._records.pop(number, None)
                    for line in self._templates.keys() - self._books.lines.keys():
                        del self._templates[line]
        finally:
            for segment in gone:
                segment.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("this node's memory of snapshots was closed")


@dataclass(frozen=True)
class Reading:
    copy: Copy
    segment: Segment
    content: Content


@dataclass(frozen=True)
class Receiving:
    copy: Copy
    view: memoryview


def _checked(record: ShardRecord, reading: Reading) -> ShardRecord:
    """With its partial digests, after the bytes were compared with what their sender said of them."""
    with reading.segment.map() as data:
        found = xxhash.xxh3_64(data).hexdigest()
        if record.xxh3 not in ("", found):
            where = Where(rank=record.rank, step=record.step, generation=record.generation)
            raise IntegrityError("a shard in this node's memory is not what was put there", where)
        buffers = {t.key: (t.dtype, data[t.begin : t.begin + t.numel * ITEM_BYTES[t.dtype]]) for t in record.tensors}
        digests = piece_digests(record.pieces, buffers)
        for _, view in buffers.values():
            view.release()
    return replace(record, xxh3=found, digests=digests)


def _of(line: Line) -> Where:
    return Where(rank=line.rank, generation=line.generation)
