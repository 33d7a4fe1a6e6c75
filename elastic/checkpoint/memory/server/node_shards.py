"""Whole shards that one node holds: those of its own ranks, and replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elastic.checkpoint.hashing import piece_digests
from elastic.checkpoint.memory.segments import Segment
from elastic.checkpoint.memory.server.segment_pool import SegmentPool
from elastic.checkpoint.memory.shard_buffers import ShardBuffer, ShardKey, ShardShape, SnapshotRef
from elastic.checkpoint.memory.work_counter import WorkCounter, xxh3_of
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.checkpoint.manifest_json import ITEM_BYTES
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import IntegrityError, Where


@dataclass(frozen=True)
class Content:
    """The facts about a complete buffer. `xxh3` is empty until the hash is computed.

    `record` is set once the bytes were checked.
    """

    template: ShardRecord
    extra_state: Mapping[str, Json] | None
    xxh3: str
    record: ShardRecord | None = None


@dataclass(frozen=True)
class Reading:
    buffer: ShardBuffer
    segment: Segment
    content: Content


@dataclass(frozen=True)
class Receiving:
    buffer: ShardBuffer
    view: memoryview


class NodeShards:
    """Thread-safe. A buffer's memory is used inside `reading` or `receiving` only, which keep it in place."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool

    @property
    def settled(self) -> SnapshotRef:
        return self._pool.settled

    def open(self, key: ShardKey, template: ShardRecord, base: SnapshotRef | None = None) -> None:
        """Raises UsageError when the node lacks the memory for two buffers, Fenced when the generation is over."""
        self._pool.open(key, ShardShape(template.world_size, template.bytes, {key.rank: template}), base)

    @contextmanager
    def writing(self, key: ShardKey, mapped: Collection[int] = ()) -> Iterator[tuple[int, Segment]]:
        """The buffer that the rank's own worker writes next; its old content is invalid from now on.

        `mapped`: the segments that it has mapped. One of them that is free is preferred to a new one.
        The worker writes after this context ends: the descriptor must stay in place only until it is sent.
        """
        buffer = self._pool.begin(key, mapped)
        try:
            yield buffer.id, self._pool.segment(buffer.id)
        finally:
            self._pool.release(buffer)

    def commit(self, key: ShardKey, number: int, step: int, extra_state: Mapping[str, Json] | None) -> None:
        """The buffer holds the complete snapshot of that step."""
        with self._pool.changed:
            buffer = self._pool.table.buffers.get(number)
            if buffer is None or buffer.key != key:
                raise IntegrityError(f"step {step} was committed in memory that was not assigned to it", key.where)
            self._complete(buffer, step, extra_state, "")

    @contextmanager
    def receiving(self, key: ShardKey) -> Iterator[Receiving]:
        """A replica's memory, to be filled. It is incomplete until `finish` is called."""
        buffer = self._pool.begin(key)
        try:
            with self._pool.segment(buffer.id).map() as view:
                yield Receiving(buffer, view)
        finally:
            self._pool.release(buffer)

    def finish(self, receiving: Receiving, step: int, extra_state: Mapping[str, Json] | None, xxh3: str) -> None:
        """Every byte has arrived. Raises Fenced when the generation ended meanwhile."""
        with self._pool.changed:
            self._complete(receiving.buffer, step, extra_state, xxh3)

    @contextmanager
    def reading(self, generation: int, step: int, rank: int, replica: bool | None = None) -> Iterator[Reading]:
        """A complete buffer, kept in place meanwhile. Raises IntegrityError when there is none."""
        buffer = self._pool.find(generation, step, rank, replica)
        try:
            yield Reading(buffer, self._pool.segment(buffer.id), buffer.content)
        finally:
            self._pool.release(buffer)

    def hashed(self, number: int, step: int, xxh3: str) -> None:
        """Set the hash of a complete buffer, computed while it was sent."""
        with self._pool.changed:
            buffer = self._pool.table.buffers.get(number)
            if buffer is not None and buffer.step == step:
                buffer.content = replace(buffer.content, xxh3=xxh3)

    def hash_own(self, key: ShardKey, number: int, step: int) -> None:
        """Compute the hash of a snapshot that is not sent to another node. Raises IntegrityError if it is gone."""
        with self.reading(key.generation, step, key.rank, replica=False) as reading, reading.segment.map() as data:
            self.hashed(number, step, xxh3_of(data, self._pool.work))

    def has(self, key: ShardKey, step: int) -> bool:
        with self._pool.changed:
            return self._pool.table.find(key.generation, step, key.rank, key.replica) is not None

    def newest(self, key: ShardKey) -> tuple[int, int, Mapping[str, Json] | None] | None:
        """Step, number and extra state of the newest complete buffer of a rank's own shard, or None."""
        with self._pool.changed:
            buffers = [c for c in self._pool.table.buffers.values() if c.key == key and not c.dropped]
            buffer = max((c for c in buffers if c.step is not None), key=lambda c: c.step or 0, default=None)
            return None if buffer is None else (buffer.step or 0, buffer.id, buffer.content.extra_state)

    def record(self, held: Held, digests: bool) -> ShardRecord:
        """See `SnapshotServer.record`."""
        with self.reading(held.generation, held.step, held.rank, held.replica) as reading:
            content = reading.content
            if content.record is not None:
                return content.record
            known = replace(content.template, step=held.step, extra_state=content.extra_state, xxh3=content.xxh3)
            if digests:
                known = _checked(known, reading, self._pool.work)
                with self._pool.changed:
                    reading.buffer.content = replace(reading.buffer.content, record=known)
            return known

    def _complete(self, buffer: ShardBuffer, step: int, extra_state: Mapping[str, Json] | None, xxh3: str) -> None:
        table = self._pool.table
        table.complete(buffer, step)
        buffer.content = Content(table.shards[buffer.key].templates[buffer.key.rank], extra_state, xxh3)


def _checked(record: ShardRecord, reading: Reading, work: WorkCounter) -> ShardRecord:
    """Add the partial digests, after the bytes were compared with their sender's hash."""
    with reading.segment.map() as data:
        found = xxh3_of(data, work)
        if record.xxh3 not in ("", found):
            where = Where(rank=record.rank, step=record.step, generation=record.generation)
            raise IntegrityError("a shard in this node's memory does not match its hash: the memory was damaged", where)
        buffers = {t.key: (t.dtype, data[t.begin : t.begin + t.numel * ITEM_BYTES[t.dtype]]) for t in record.tensors}
        digests = piece_digests(record.chunks, buffers, work.add)
        for _, view in buffers.values():
            view.release()
    return replace(record, xxh3=found, digests=digests)
