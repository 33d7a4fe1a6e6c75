"""Whole shards that one node holds: its own ranks' and the replicas of others'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elastic.checkpoint.hashing import piece_digests
from elastic.checkpoint.memory.segments import Segment
from elastic.checkpoint.memory.server.segment_pool import Shelf
from elastic.checkpoint.memory.shard_buffers import Copy, Line, Mark, Shape
from elastic.checkpoint.memory.work_counter import Pace, hash_of
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.checkpoint.manifest_json import ITEM_BYTES
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import IntegrityError, Where


@dataclass(frozen=True)
class Content:
    """What was said of a copy's bytes when they were complete. `xxh3` is empty while nobody has computed it.

    `record` is there once the bytes were checked.
    """

    template: ShardRecord
    client: Mapping[str, Json] | None
    xxh3: str
    record: ShardRecord | None = None


@dataclass(frozen=True)
class Reading:
    copy: Copy
    segment: Segment
    content: Content


@dataclass(frozen=True)
class Receiving:
    copy: Copy
    view: memoryview


class Store:
    """Thread-safe. Whoever uses a copy's memory does so inside `reading` or `receiving`, which keep it in place."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    @property
    def mark(self) -> Mark:
        return self._shelf.mark

    def open(self, line: Line, template: ShardRecord, base: Mark | None = None) -> None:
        """Raises UsageError when the node lacks the memory for two copies, Fenced when the generation is over."""
        self._shelf.open(line, Shape(template.world_size, template.bytes, {line.rank: template}), base)

    @contextmanager
    def writing(self, line: Line) -> Iterator[tuple[int, Segment]]:
        """The copy that the rank's own worker writes next; what it held is invalid from now on.

        The worker writes after this is left: what must stay in place until then is the descriptor it is given.
        """
        copy = self._shelf.begin(line)
        try:
            yield copy.id, self._shelf.segment(copy.id)
        finally:
            self._shelf.let_go(copy)

    def commit(self, line: Line, number: int, step: int, client: Mapping[str, Json] | None) -> None:
        """The copy holds the snapshot of that step, complete."""
        with self._shelf.changed:
            copy = self._shelf.books.copies.get(number)
            if copy is None or copy.line != line:
                raise IntegrityError(f"step {step} was committed in memory that was not given out for it", line.where)
            self._complete(copy, step, client, "")

    @contextmanager
    def receiving(self, line: Line) -> Iterator[Receiving]:
        """A replica's memory, to be filled. It counts only once `finish` was called."""
        copy = self._shelf.begin(line)
        try:
            with self._shelf.segment(copy.id).map() as view:
                yield Receiving(copy, view)
        finally:
            self._shelf.let_go(copy)

    def finish(self, receiving: Receiving, step: int, client: Mapping[str, Json] | None, xxh3: str) -> None:
        """Every byte has arrived. Raises Fenced when the generation ended meanwhile."""
        with self._shelf.changed:
            self._complete(receiving.copy, step, client, xxh3)

    @contextmanager
    def reading(self, generation: int, step: int, rank: int, replica: bool | None = None) -> Iterator[Reading]:
        """A complete copy, kept in place meanwhile. Raises IntegrityError when there is none."""
        copy = self._shelf.find(generation, step, rank, replica)
        try:
            yield Reading(copy, self._shelf.segment(copy.id), copy.note)
        finally:
            self._shelf.let_go(copy)

    def hashed(self, number: int, step: int, xxh3: str) -> None:
        """The hash of a complete copy's bytes, computed while they were sent."""
        with self._shelf.changed:
            copy = self._shelf.books.copies.get(number)
            if copy is not None and copy.step == step:
                copy.note = replace(copy.note, xxh3=xxh3)

    def has(self, line: Line, step: int) -> bool:
        with self._shelf.changed:
            return self._shelf.books.find(line.generation, step, line.rank, line.replica) is not None

    def newest(self, line: Line) -> tuple[int, int, Mapping[str, Json] | None] | None:
        """Step, number and client state of the newest complete copy of a rank's own line; None where there is none."""
        with self._shelf.changed:
            copies = [c for c in self._shelf.books.copies.values() if c.line == line and not c.dropped]
            copy = max((c for c in copies if c.step is not None), key=lambda c: c.step or 0, default=None)
            return None if copy is None else (copy.step or 0, copy.id, copy.note.client)

    def record(self, held: Held, digests: bool) -> ShardRecord:
        """See `MemoryServer.record`."""
        with self.reading(held.generation, held.step, held.rank, held.replica) as reading:
            content = reading.content
            if content.record is not None:
                return content.record
            known = replace(content.template, step=held.step, client=content.client, xxh3=content.xxh3)
            if digests:
                known = _checked(known, reading, self._shelf.pace)
                with self._shelf.changed:
                    reading.copy.note = replace(reading.copy.note, record=known)
            return known

    def _complete(self, copy: Copy, step: int, client: Mapping[str, Json] | None, xxh3: str) -> None:
        books = self._shelf.books
        books.complete(copy, step)
        copy.note = Content(books.lines[copy.line].templates[copy.line.rank], client, xxh3)


def _checked(record: ShardRecord, reading: Reading, pace: Pace) -> ShardRecord:
    """With its partial digests, after the bytes were compared with what their sender said of them."""
    with reading.segment.map() as data:
        found = hash_of(data, pace)
        if record.xxh3 not in ("", found):
            where = Where(rank=record.rank, step=record.step, generation=record.generation)
            raise IntegrityError("a shard in this node's memory is not what was put there", where)
        buffers = {t.key: (t.dtype, data[t.begin : t.begin + t.numel * ITEM_BYTES[t.dtype]]) for t in record.tensors}
        digests = piece_digests(record.chunks, buffers, pace.add)
        for _, view in buffers.values():
            view.release()
    return replace(record, xxh3=found, digests=digests)
