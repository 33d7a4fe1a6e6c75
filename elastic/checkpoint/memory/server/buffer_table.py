"""Which buffer of a shard may be overwritten, freed or read: pure bookkeeping without memory, sockets or a clock.

A *shard key* names a rank's own shard in one generation, a replica of it, or the parity of a stripe of ranks. A key has
at most two *buffers*, of which at most one is incomplete. *Settled* is the newest snapshot that is known to be complete
on all ranks; its buffers are neither overwritten nor freed before a newer one is settled. Older generations stay until
then too.
"""

from __future__ import annotations

from collections.abc import Iterator

from elastic.checkpoint.memory.shard_buffers import ShardBuffer, ShardKey, ShardShape, SnapshotRef
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import Fenced, IntegrityError

# The number of older generations that keep their buffers although none of their snapshots is settled.
_UNSETTLED_GENERATIONS = 2


class BufferTable:
    """Not thread-safe. Buffers are identified by numbers that the owner of the memory assigns."""

    def __init__(self) -> None:
        self.settled: SnapshotRef = (-1, -1)
        self.newest = -1
        self.shards: dict[ShardKey, ShardShape] = {}
        self.buffers: dict[int, ShardBuffer] = {}

    def open(self, key: ShardKey, shape: ShardShape, base: SnapshotRef | None) -> None:
        """Add a shard, or open it again with the same shape. `base` is the snapshot that its generation started from:
        all other snapshots of older generations are dropped then. Raises Fenced for a generation that is over.

        Each rank of a stripe opens it once; the stripe has no buffers before all of them have done so.
        """
        self._check_generation(key)
        known = self.shards.get(key, shape)
        if key.stripe:
            shape = known.joined(shape)
        if not known.agrees(shape) and (self._of(key) or not key.stripe):
            raise IntegrityError("a shard was opened again with another size within its generation", key.where)
        self.newest = key.generation
        self.shards[key] = shape
        if base is not None and base[0] < key.generation and self.settled[0] < key.generation:
            # Not max(): a run that rolled back to an older snapshot needs that one.
            self.settled = base
            self._drop(buffer for buffer in self._older(key.generation) if buffer.ref != base)
        else:
            self._drop(self._obsolete(key.generation))

    def undo_open(self, key: ShardKey, before: ShardShape | None) -> None:
        """Opening failed: restore the shape from before; existing buffers stay readable."""
        if before is not None:
            self.shards[key] = before
        elif not self._of(key):
            self.shards.pop(key, None)

    def unknown(self, key: ShardKey) -> list[int]:
        """The ranks of the stripe that have not opened it yet."""
        return [rank for rank in key.ranks if rank not in self._shape(key).templates]

    def room_for_more(self, key: ShardKey) -> bool:
        """True for a shard of the newest generation that lacks its second buffer."""
        return key in self.shards and key.generation == self.newest and len(self._of(key)) < 2

    def next_buffer(self, key: ShardKey) -> ShardBuffer | None:
        """The buffer that the next snapshot overwrites; None when the shard needs one more buffer.

        The buffer may have users: the caller waits for them. Raises Fenced, and IntegrityError for an own shard whose
        last snapshot may be complete on all ranks without this node knowing.
        """
        self._check_generation(key)
        self._shape(key)
        buffers = self._of(key)
        unsettled = [buffer for buffer in buffers if buffer.ref is not None and buffer.ref > self.settled]
        if unsettled and not key.replica:
            raise IntegrityError(
                f"the snapshot of step {unsettled[0].step} is not yet known to be complete on all ranks; call "
                "`settled` before the next one is written",
                key.where,
            )
        free = [buffer for buffer in buffers if buffer.ref != self.settled]
        incomplete = [buffer for buffer in free if buffer.step is None]
        if incomplete:
            return incomplete[0]
        if len(buffers) < 2:
            return None
        return min(free, key=lambda buffer: buffer.step or 0)

    def add(self, key: ShardKey, number: int) -> ShardBuffer:
        buffer = self.buffers[number] = ShardBuffer(number, key)
        return buffer

    def begin(self, buffer: ShardBuffer) -> None:
        """The content is invalid from here on."""
        if buffer.users:
            raise RuntimeError(f"buffer {buffer.id} is in use and must not be overwritten")
        buffer.step = buffer.content = None

    def complete(self, buffer: ShardBuffer, step: int) -> None:
        """Raises Fenced when the buffer's generation is over, and IntegrityError for a step that is not a new one."""
        self._check_generation(buffer.key)
        steps = [other.step for other in self._of(buffer.key) if other.step is not None]
        if buffer.dropped or buffer.step is not None or step <= max(steps, default=-1):
            raise IntegrityError(f"step {step} follows {sorted(steps)} and is not a new snapshot", buffer.key.where)
        buffer.step = step

    def settle(self, settled: SnapshotRef) -> None:
        """The snapshot is complete on all ranks: drop older generations."""
        # A generation that is over must not free anything.
        if settled > self.settled and settled[0] >= self.newest:
            self.settled = settled
            self._drop(self._older(settled[0]))

    def adopt(self, key: ShardKey, shape: ShardShape, number: int, step: int) -> ShardBuffer:
        """Add a complete buffer that was rebuilt on this node; its generation may be over."""
        self.shards.setdefault(key, shape)
        buffer = self.add(key, number)
        buffer.step = step
        return buffer

    def find(
        self, generation: int, step: int, rank: int, replica: bool | None = None, stripe: tuple[int, ...] = ()
    ) -> ShardBuffer | None:
        """A complete buffer, the rank's own if both exist and `replica` is None; or a stripe's parity."""
        found = [c for c in self.buffers.values() if c.ref == (generation, step) and c.key.stripe == stripe]
        fitting = [c for c in found if not c.dropped and rank in c.key.ranks and replica in (None, c.key.replica)]
        return min(fitting, key=lambda c: c.key.replica, default=None)

    def gathering(self, key: ShardKey) -> ShardBuffer | None:
        """The stripe's buffer whose parity is being assembled."""
        return next((buffer for buffer in self._of(key) if buffer.step is None and buffer.content is not None), None)

    def held(self) -> tuple[Held, ...]:
        return tuple(
            Held(key.generation, buffer.step, rank, self.shards[key].world_size, key.replica, key.stripe)
            for buffer in self.buffers.values()
            if buffer.step is not None and not buffer.dropped
            for key in [buffer.key]
            for rank in key.ranks
        )

    def collect(self) -> list[int]:
        """Remove and return the buffers whose memory can be freed; old shards without buffers are removed, too."""
        gone = [buffer.id for buffer in self.buffers.values() if buffer.dropped and not buffer.users]
        for number in gone:
            del self.buffers[number]
        used = {buffer.key for buffer in self.buffers.values()}
        for key in [key for key in self.shards if key.generation < self.newest and key not in used]:
            del self.shards[key]
        return gone

    def wanted_bytes(self) -> int:
        """The buffers that the newest generation's shards still lack: two each, and a third one per stripe, in which a
        lost shard is rebuilt."""
        return sum(
            shape.nbytes * (2 + bool(key.stripe) - len(self._of(key)))
            for key, shape in self.shards.items()
            if key.generation == self.newest
        )

    def expiring(self) -> list[int]:
        """The buffers that are freed when a snapshot of the newest generation is settled."""
        return [buffer.id for buffer in self.buffers.values() if buffer.key.generation < self.newest]

    def _check_generation(self, key: ShardKey) -> None:
        if key.generation < max(self.newest, self.settled[0]):
            raise Fenced(f"generation {self.newest} has begun here: snapshots of older ones are refused", key.where)

    def _shape(self, key: ShardKey) -> ShardShape:
        if key not in self.shards:
            raise IntegrityError("a shard was written before it was opened", key.where)
        return self.shards[key]

    def _of(self, key: ShardKey) -> list[ShardBuffer]:
        return [buffer for buffer in self.buffers.values() if buffer.key == key and not buffer.dropped]

    def _older(self, generation: int) -> Iterator[ShardBuffer]:
        return (buffer for buffer in self.buffers.values() if buffer.key.generation < generation)

    def _obsolete(self, generation: int) -> Iterator[ShardBuffer]:
        """Incomplete buffers of older generations, and all buffers of generations that never settled a snapshot."""
        held = {buffer.key.generation for buffer in self._older(generation) if buffer.step is not None}
        unsettled = sorted(held - {self.settled[0]})[-_UNSETTLED_GENERATIONS:]
        kept = {self.settled[0], *unsettled}
        return (c for c in self._older(generation) if c.step is None or c.key.generation not in kept)

    def _drop(self, buffers: Iterator[ShardBuffer]) -> None:
        for buffer in list(buffers):
            buffer.dropped = True
