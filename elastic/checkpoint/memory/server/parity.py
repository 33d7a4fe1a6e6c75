"""The parity that one node keeps for the ranks of other nodes, and a shard made of it again."""

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
from elastic.checkpoint.memory.server.segment_pool import Shelf
from elastic.checkpoint.memory.shard_buffers import Copy, Line, Mark, Shape
from elastic.checkpoint.memory.work_counter import STILL_LIMIT_S, hash_of
from elastic.core.checkpoint.manifest import Json, ShardRecord
from elastic.core.checkpoint.snapshots import Held
from elastic.core.errors import IntegrityError, StorageError, Where
from elastic.transport.channel import IO_LIMIT_S
from elastic.transport.handshake import Address

logger = logging.getLogger(__name__)

# Ranks open a stripe at the same step; who sends first waits for the others' sizes, but less than its own patience.
_MEMBERS_LIMIT_S = IO_LIMIT_S / 2


# The first so many bytes of a shard that is held at that address, in chunks; each is valid until the next is taken.
Read = Callable[[Address, Held, int], Iterable[memoryview]]


@dataclass(frozen=True)
class Contribution:
    """One rank's way into a block, over one connection. `begin`: so many bytes are there already."""

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
        """The next bytes, with what their sender says is their hash. Raises ConnectionError, which is tried again."""
        if chunk_hash(chunk) != found:
            raise ConnectionError(f"bytes of rank {self.rank}'s shard were changed on their way")
        self._block.add(self.rank, self._turn, self._memory, chunk)

    def end(self, xxh3: str) -> None:
        self._block.end(self.rank, self._turn, xxh3)


class Parity:
    """Thread-safe. `contributing` and `rebuild` keep the memory that they use in place."""

    def __init__(self, shelf: Shelf, read: Read) -> None:
        self._shelf = shelf
        self._read = read
        self._rebuilding = threading.Lock()

    def open(self, stripe: Sequence[int], template: ShardRecord, base: Mark | None = None) -> Line:
        """One of the stripe's ranks is known now. Raises UsageError when the node lacks the memory."""
        ranks = tuple(sorted(set(stripe)))
        if template.rank not in ranks or len(ranks) < 2 or ranks[-1] >= template.world_size:
            where = Where(rank=template.rank, generation=template.generation)
            raise IntegrityError(f"{list(stripe)} is no stripe of which this rank could be a part", where)
        line = Line(template.generation, ranks[0], replica=True, stripe=ranks)
        shape = Shape(template.world_size, template.bytes, {template.rank: template})
        self._shelf.open(line, shape, base)
        return line

    @contextmanager
    def contributing(
        self, line: Line, rank: int, step: int, client: Mapping[str, Json] | None
    ) -> Iterator[Contribution | None]:
        """A rank's share of the parity of a step; None when it is there already.

        The parity counts from the moment when every rank's share has ended, whichever is last.
        """
        copy = self._claim(line, rank, step)
        if copy is None:
            yield None
            return
        try:
            block: Block = copy.note
            turn = block.enter(rank, client)
            part = block.parts[rank]
            with self._shelf.segment(copy.id).map() as memory:
                yield Contribution(rank, part.done_bytes, part.nbytes, block, turn, memory)
            with self._shelf.changed:
                if block.whole and copy.step is None:
                    self._shelf.books.complete(copy, step)
        finally:
            self._shelf.let_go(copy)

    def rebuild(self, held: Held, sources: Mapping[int, Address]) -> Held:
        """Make the shard of the parity that is here and of the stripe's other shards, read from `sources` (by rank).

        It is then held here as a replica is, which is what is returned; nothing is done where it is already. Raises
        IntegrityError when the parity is gone or the result is not what the rank had sent, and StorageError when a
        shard cannot be read or there is no memory.
        """
        line = Line(held.generation, held.rank, replica=True)
        made = Held(held.generation, held.step, held.rank, held.world_size, replica=True)
        # One at a time: who asks again, because the run begins once more, finds what the first one made.
        self._turn_to_rebuild(held)
        began = time.perf_counter()
        try:
            with self._shelf.changed:
                if self._shelf.books.find(held.generation, held.step, held.rank, True) is not None:
                    return made
            copy = self._shelf.find(held.generation, held.step, held.rank, True, held.stripe)
            try:
                self._make(copy, held, line, sources)
            finally:
                self._shelf.let_go(copy)
        finally:
            self._rebuilding.release()
        took_s = time.perf_counter() - began
        logger.info("rank %d's shard of step %d was made of parity in %.3f s", held.rank, held.step, took_s)
        return made

    def _turn_to_rebuild(self, held: Held) -> None:
        """Others may take as long as their shards are large, as long as they go on."""
        before: int | None = None
        while not self._rebuilding.acquire(timeout=STILL_LIMIT_S):
            now = self._shelf.pace.bytes
            if now == before:
                what = f"another shard that is made of parity has stood still for {STILL_LIMIT_S:.0f} s"
                raise StorageError(what, _where(held))
            before = now

    def _claim(self, line: Line, rank: int, step: int) -> Copy | None:
        """The copy that the share goes into, with one more user."""
        deadline = time.monotonic() + _MEMBERS_LIMIT_S
        shelf, books = self._shelf, self._shelf.books
        with shelf.changed:
            while True:
                shelf.check_open()
                if books.find(line.generation, step, rank, True, line.stripe) is not None:
                    return None
                unknown = books.unknown(line)
                copy = None if unknown else self._copy(line, step)
                if copy is not None:
                    return copy
                if not shelf.changed.wait(deadline - time.monotonic()):
                    ranks = ", ".join(map(str, unknown))
                    why = f"the shards of ranks {ranks} are not known yet" if unknown else "its memory is in use"
                    raise StorageError(f"parity of step {step} cannot be begun: {why}", line.where)

    def _copy(self, line: Line, step: int) -> Copy | None:
        """For holders of the lock; None where it has to be waited for."""
        copy = self._shelf.books.gathering(line)
        block: Block | None = copy.note if copy is not None else None
        if copy is not None and block is not None:
            if block.step > step:
                what = f"parity of step {block.step} is put together here, not of step {step} any more"
                raise IntegrityError(what, line.where)
            if block.step == step:
                copy.users += 1
                return copy
            block.cancel()
        copy = self._shelf.claim(line)
        if copy is not None:
            templates = self._shelf.books.lines[line].templates
            copy.note = Block(line.generation, step, {rank: templates[rank].bytes for rank in line.stripe})
        return copy

    def _make(self, copy: Copy, held: Held, line: Line, sources: Mapping[int, Address]) -> None:
        shelf, block = self._shelf, copy.note
        with shelf.changed:
            shape = shelf.books.lines[copy.line]
            template, part = shape.templates[held.rank], block.parts[held.rank]
            number = shelf.allocate(template.bytes, _where(held))
        try:
            with shelf.segment(number).map() as target:
                with shelf.segment(copy.id).map() as parity, parity[: template.bytes] as begin:
                    target[:] = begin
                lengths = {rank: min(template.bytes, shape.templates[rank].bytes) for rank in held.others}
                self._add_others(held, lengths, sources, target)
                found = hash_of(target, shelf.pace)
            if found != part.xxh3:
                raise IntegrityError("a shard that was made of parity is not what its rank had sent", _where(held))
            with shelf.changed:
                if copy.dropped:
                    raise IntegrityError("the parity of a shard was given up while it was used", _where(held))
                shape = Shape(held.world_size, template.bytes, {held.rank: template})
                shelf.books.adopt(line, shape, number, held.step).note = Content(template, part.client, found)
        except BaseException:
            shelf.give_back(number)
            raise

    def _add_others(
        self, held: Held, lengths: Mapping[int, int], sources: Mapping[int, Address], target: memoryview
    ) -> None:
        """XOR the beginnings of the stripe's other shards into the target, all at the same time."""
        missing = [rank for rank in lengths if rank not in sources]
        if missing:
            raise IntegrityError(f"nobody is known to hold the shards of ranks {missing}", _where(held))
        lock = threading.Lock()

        def add(rank: int) -> None:
            at = 0
            for chunk in self._read(sources[rank], replace(held, rank=rank), lengths[rank]):
                with lock, target[at : at + len(chunk)] as place:
                    xor_into(place, chunk)
                at += len(chunk)
                self._shelf.pace.add(len(chunk))

        with ThreadPoolExecutor(len(lengths), thread_name_prefix="shard from parity") as pool:
            done = [pool.submit(add, rank) for rank in lengths]
        for future in done:
            future.result()


def _where(held: Held) -> Where:
    return Where(rank=held.rank, step=held.step, generation=held.generation)
