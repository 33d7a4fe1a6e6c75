"""Parity that one node keeps for ranks of other nodes, and the rebuilding of a shard from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elastic.checkpoint.memory.server.node_shards import Content
from elastic.checkpoint.memory.server.parity_blocks import Block, chunk_hash, xor_into
from elastic.checkpoint.memory.server.segment_pool import SegmentPool
from elastic.checkpoint.memory.shard_buffers import ShardBuffer, ShardKey, ShardShape, SnapshotRef
from elastic.checkpoint.memory.work_counter import NO_PROGRESS_LIMIT_S, xxh3_of
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import IntegrityError, StorageError, Where
from elastic.transport.channel import IO_LIMIT_S
from elastic.transport.handshake import Address

logger = logging.getLogger(__name__)

# Ranks open a stripe at the same step; the first one waits for the sizes of the others, for less than its own limit.
_MEMBERS_LIMIT_S = IO_LIMIT_S / 2


# Reads the first bytes of a shard from an address, in chunks; each is valid until the next is taken.
Read = Callable[[Address, Held, int], Iterable[memoryview]]


@dataclass(frozen=True)
class Contribution:
    """One rank's share of a block, over one connection. `begin`: the number of bytes that were added already."""

    rank: int
    begin: int
    nbytes: int
    _block: Block
    _turn: int
    _memory: memoryview

    @property
    def done(self) -> bool:
        return self._block.parts[self.rank].complete

    def add(self, chunk: memoryview, found: bytes) -> None:
        """Add the next bytes, with their sender's hash. Raises ConnectionError, after which the sender retries."""
        if chunk_hash(chunk) != found:
            raise ConnectionError(f"bytes of rank {self.rank}'s shard were damaged in transit")
        self._block.add(self.rank, self._turn, self._memory, chunk)

    def end(self, xxh3: str) -> None:
        self._block.end(self.rank, self._turn, xxh3)


class Parity:
    """Thread-safe. `contributing` and `rebuild` pin the memory that they use."""

    def __init__(self, pool: SegmentPool, read: Read) -> None:
        self._pool = pool
        self._read = read
        self._rebuilding = threading.Lock()

    def open(self, stripe: Sequence[int], template: ShardRecord, base: SnapshotRef | None = None) -> ShardKey:
        """Add one of the stripe's ranks. Raises UsageError when the node lacks the memory."""
        ranks = tuple(sorted(set(stripe)))
        if template.rank not in ranks or len(ranks) < 2 or ranks[-1] >= template.world_size:
            where = Where(rank=template.rank, generation=template.generation)
            raise IntegrityError(f"{list(stripe)} is not a valid stripe that contains this rank", where)
        key = ShardKey(template.generation, ranks[0], replica=True, stripe=ranks)
        shape = ShardShape(template.world_size, template.bytes, {template.rank: template})
        self._pool.open(key, shape, base)
        return key

    @contextmanager
    def contributing(
        self, key: ShardKey, rank: int, step: int, extra_state: Mapping[str, Json] | None
    ) -> Iterator[Contribution | None]:
        """A rank's share of the parity of a step; None when it is complete already.

        The parity is complete once the last rank's share has ended.
        """
        buffer = self._claim(key, rank, step)
        if buffer is None:
            yield None
            return
        try:
            block: Block = buffer.content
            attempt = block.enter(rank, extra_state)
            part = block.parts[rank]
            with self._pool.segment(buffer.id).map() as memory:
                yield Contribution(rank, part.done_bytes, part.nbytes, block, attempt, memory)
            with self._pool.changed:
                if block.whole and buffer.step is None:
                    self._pool.table.complete(buffer, step)
        finally:
            self._pool.release(buffer)

    def rebuild(self, held: Held, sources: Mapping[int, Address]) -> Held:
        """Rebuild the shard from the parity of this node and the stripe's other shards, read from `sources` (by rank).

        The result is held and returned as a replica; an existing one is reused. Raises IntegrityError when the parity
        is gone or the result does not match the rank's hash, and StorageError when a shard cannot be read or memory
        is lacking.
        """
        key = ShardKey(held.generation, held.rank, replica=True)
        made = Held(held.generation, held.step, held.rank, held.world_size, replica=True)
        # One at a time: a second request, after the run has restarted, finds the result of the first.
        self._acquire_rebuild(held)
        began = time.perf_counter()
        try:
            with self._pool.changed:
                if self._pool.table.find(held.generation, held.step, held.rank, True) is not None:
                    return made
            buffer = self._pool.find(held.generation, held.step, held.rank, True, held.stripe)
            try:
                self._make(buffer, held, key, sources)
            finally:
                self._pool.release(buffer)
        finally:
            self._rebuilding.release()
        took_s = time.perf_counter() - began
        logger.info("rank %d's shard of step %d was rebuilt from parity in %.3f s", held.rank, held.step, took_s)
        return made

    def _acquire_rebuild(self, held: Held) -> None:
        """Wait for another rebuild without a limit on its duration, as long as it makes progress."""
        before: int | None = None
        while not self._rebuilding.acquire(timeout=NO_PROGRESS_LIMIT_S):
            now = self._pool.work.bytes
            if now == before:
                what = f"the rebuild of another shard from parity has made no progress for {NO_PROGRESS_LIMIT_S:.0f} s"
                raise StorageError(what, _where(held))
            before = now

    def _claim(self, key: ShardKey, rank: int, step: int) -> ShardBuffer | None:
        """The buffer that the share goes into, with one more user."""
        deadline = time.monotonic() + _MEMBERS_LIMIT_S
        pool, table = self._pool, self._pool.table
        with pool.changed:
            while True:
                pool.check_open()
                if table.find(key.generation, step, rank, True, key.stripe) is not None:
                    return None
                unknown = table.unknown(key)
                buffer = None if unknown else self._copy(key, step)
                if buffer is not None:
                    return buffer
                if not pool.changed.wait(deadline - time.monotonic()):
                    ranks = ", ".join(map(str, unknown))
                    why = f"the shards of ranks {ranks} are not known yet" if unknown else "its memory is in use"
                    raise StorageError(f"parity of step {step} cannot start: {why}", key.where)

    def _copy(self, key: ShardKey, step: int) -> ShardBuffer | None:
        """The caller holds the lock; None where the caller must wait."""
        buffer = self._pool.table.gathering(key)
        block: Block | None = buffer.content if buffer is not None else None
        if buffer is not None and block is not None:
            if block.step > step:
                what = f"parity of step {block.step} is being assembled here, and step {step} is older"
                raise IntegrityError(what, key.where)
            if block.step == step:
                buffer.users += 1
                return buffer
            block.cancel()
        buffer = self._pool.claim(key)
        if buffer is not None:
            templates = self._pool.table.shards[key].templates
            buffer.content = Block(key.generation, step, {rank: templates[rank].bytes for rank in key.stripe})
        return buffer

    def _make(self, buffer: ShardBuffer, held: Held, key: ShardKey, sources: Mapping[int, Address]) -> None:
        pool, block = self._pool, buffer.content
        with pool.changed:
            shape = pool.table.shards[buffer.key]
            template, part = shape.templates[held.rank], block.parts[held.rank]
            number = pool.allocate(template.bytes, _where(held))
        try:
            with pool.segment(number).map() as target:
                with pool.segment(buffer.id).map() as parity, parity[: template.bytes] as begin:
                    target[:] = begin
                lengths = {rank: min(template.bytes, shape.templates[rank].bytes) for rank in held.others}
                self._add_others(held, lengths, sources, target)
                found = xxh3_of(target, pool.work)
            if found != part.xxh3:
                raise IntegrityError(
                    "a shard that was rebuilt from parity does not match the hash of its rank", _where(held)
                )
            with pool.changed:
                if buffer.dropped:
                    raise IntegrityError("the parity of a shard was dropped while it was used", _where(held))
                shape = ShardShape(held.world_size, template.bytes, {held.rank: template})
                pool.table.adopt(key, shape, number, held.step).content = Content(template, part.extra_state, found)
        except BaseException:
            pool.give_back(number)
            raise

    def _add_others(
        self, held: Held, lengths: Mapping[int, int], sources: Mapping[int, Address], target: memoryview
    ) -> None:
        """XOR the other shards of the stripe into the target, concurrently."""
        missing = [rank for rank in lengths if rank not in sources]
        if missing:
            raise IntegrityError(f"no node is known to hold the shards of ranks {missing}", _where(held))
        lock = threading.Lock()

        def add(rank: int) -> None:
            at = 0
            for chunk in self._read(sources[rank], replace(held, rank=rank), lengths[rank]):
                with lock, target[at : at + len(chunk)] as place:
                    xor_into(place, chunk)
                at += len(chunk)
                self._pool.work.add(len(chunk))

        with ThreadPoolExecutor(len(lengths), thread_name_prefix="shard from parity") as executor:
            done = [executor.submit(add, rank) for rank in lengths]
        for future in done:
            future.result()


def _where(held: Held) -> Where:
    return Where(rank=held.rank, step=held.step, generation=held.generation)
