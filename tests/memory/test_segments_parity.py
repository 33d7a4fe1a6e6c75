"""Servers that keep parity for each other, real processes that are killed, and shards made of what is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import memory_samples as samples
import numpy as np
import pytest
import torch
import xxhash
from memory_proxy import Proxy
from memory_samples import TOKEN, held, snap, template
from test_segments_kills import hear, kill, process
from test_segments_server import used

from elastic.checkpoint.memory.records import template_to_json
from elastic.checkpoint.memory.server import parity
from elastic.checkpoint.memory.server.parity_blocks import CHUNK_BYTES, chunk_hash
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.checkpoint.memory.source import Holder, MemorySource
from elastic.checkpoint.source import ReadRange
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.checkpoint.snapshots import Held, recoverable
from elastic.core.errors import IntegrityError, StorageError, UsageError
from elastic.transport.handshake import Address, connect

STRIPE = (0, 1, 2)
LONG = 200_000  # 1.6 MB of two kinds: two chunks, and more than what lies in socket buffers of the proxy


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def server(stack: ExitStack, limit_bytes: int | None = None) -> SnapshotServer:
    return stack.enter_context(closing(samples.server(limit_bytes)))


def worker(stack: ExitStack, local_name: str) -> SnapshotClient:
    return stack.enter_context(closing(SnapshotClient(local_name, TOKEN)))


def shards(generation: int = 1, numels: tuple[int, ...] = (1000, 1000, 1000)) -> list[ShardRecord]:
    """Of 0 elements: a rank that holds nothing."""
    records = [template(rank, len(numels), generation, max(1, numel)) for rank, numel in enumerate(numels)]
    return [
        record if numel else replace(record, bytes=0, tensors=(), chunks=())
        for record, numel in zip(records, numels, strict=True)
    ]


def made_of(records: list[ShardRecord], rank: int, step: int) -> Held:
    """What a holder says that it can make."""
    return replace(held(records[rank], step, replica=True), stripe=tuple(record.rank for record in records))


class Stripe:
    """One rank on each of three nodes, and the node that keeps their parity."""

    def __init__(self, stack: ExitStack, records: list[ShardRecord], *, to: Address | None = None) -> None:
        self.records = records
        self.nodes = [server(stack) for _ in records]
        self.holder = server(stack)
        self.workers = [worker(stack, node.local_name) for node in self.nodes]
        self.open(to or self.holder.address)

    def open(self, to: Address, base: tuple[int, int] | None = None) -> None:
        for memory, record in zip(self.workers, self.records, strict=True):
            memory.open(record, record.bytes, [to], base, [other.rank for other in self.records])

    def take(self, step: int) -> None:
        """A snapshot that counts."""
        for memory, record in zip(self.workers, self.records, strict=True):
            snap(memory, record, step)
        self.settle(step)

    def settle(self, step: int) -> None:
        for memory in self.workers:
            assert memory.wait_complete(step, 60), memory.failed()
        for memory in self.workers:
            memory.settled(step)

    def sources(self, without: int) -> dict[int, Address]:
        return {rank: node.address for rank, node in enumerate(self.nodes) if rank != without}

    def assert_made(self, rank: int, step: int, generation: int = 1) -> None:
        """Without having been told anything by the rank's own node."""
        assert self.records[rank].generation == generation
        made = self.holder.rebuild(made_of(self.records, rank, step), self.sources(rank))
        assert made == held(self.records[rank], step, replica=True)
        assert self.holder.record(made) == samples.full_record(self.records[rank], step)


@pytest.mark.parametrize("numels", [(1000, 1000, 1000), (700, 1, 131_072), (5, 140_000, 131_069), (0, 0, 7)])
def test_each_shard_is_made_bit_by_bit(stack: ExitStack, numels: tuple[int, ...]) -> None:
    stripe = Stripe(stack, shards(numels=numels))
    for step in (1, 2, 3):
        stripe.take(step)
    # The settled one stays until the next is complete on all ranks.
    assert set(stripe.holder.held()) == {made_of(stripe.records, rank, step) for rank in STRIPE for step in (2, 3)}
    longest = max(record.bytes for record in stripe.records)
    stats = stripe.holder.stats()
    assert (stats["parity_bytes"], stats["replica_bytes"]) == (2 * longest, 0)
    for step in (3, 2):
        for rank in STRIPE:
            stripe.assert_made(rank, step)


def test_a_snapshot_is_put_together_and_read_with_a_shard_of_parity(stack: ExitStack) -> None:
    stripe = Stripe(stack, shards())
    stripe.take(1)
    lost = stripe.nodes[1]
    found = {str(at): node.held() for at, node in enumerate([*stripe.nodes, stripe.holder]) if node is not lost}
    (snapshot,) = recoverable(found)
    assert snapshot.holders == ("0", "3", "2")
    lost.close()
    stripe.assert_made(1, 1)
    nodes = [stripe.nodes[0], stripe.holder, stripe.nodes[2]]
    records = [node.record(held(r, 1, replica=r.rank == 1)) for node, r in zip(nodes, stripe.records, strict=True)]
    manifest = assemble(records, run_id="run")
    for local in (None, stripe.holder.local_name):
        holders = {1: Holder(stripe.holder.address, local)}
        for key, expected in samples.tensors(stripe.records[1], 1).items():
            target = torch.zeros(len(expected))
            source = MemorySource(lambda _: manifest, holders, TOKEN, timeout_s=30)
            source.read(manifest, [ReadRange(1, key, 0, len(expected), target)])
            assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


def test_a_shard_is_made_once(stack: ExitStack) -> None:
    stripe = Stripe(stack, shards(numels=(LONG, LONG, LONG)))
    stripe.take(1)
    wanted, sources = made_of(stripe.records, 0, 1), stripe.sources(0)
    threads = [threading.Thread(target=stripe.holder.rebuild, args=(wanted, sources)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stripe.holder.stats()["replica_bytes"] == stripe.records[0].bytes
    assert_no_stray_memory(stripe.holder)
    # It is there: the others are not needed any more.
    stripe.holder.rebuild(wanted, {})
    # What a generation begins with stays, what was made of parity too.
    stripe.records = shards(2)
    stripe.open(stripe.holder.address, base=(1, 1))
    stripe.take(2)
    stripe.take(3)  # carries the mark of step 2
    assert {item.generation for item in stripe.holder.held()} == {2}
    assert stripe.holder.stats()["replica_bytes"] == 0


class Turns:
    """Somebody else's turn: not free for so many waits, in each of which so many bytes of work are done."""

    def __init__(self, stripe: Stripe, waits: int, nbytes: int) -> None:
        self._work, self._waits, self._bytes = stripe.holder._pool.work, waits, nbytes

    def acquire(self, timeout: float) -> bool:
        self._waits -= 1
        self._work.add(self._bytes)
        return self._waits < 0

    def release(self) -> None:
        pass


def test_who_comes_second_waits_for_as_long_as_the_first_goes_on(stack: ExitStack) -> None:
    stripe = Stripe(stack, shards())
    stripe.take(1)
    parity_of: Any = stripe.holder._parity
    parity_of._rebuilding = Turns(stripe, 1000, 0)
    with pytest.raises(StorageError, match=r"from parity has made no progress for 30 s \(rank 1, step 1"):
        stripe.assert_made(1, 1)
    parity_of._rebuilding = Turns(stripe, 1000, 1)
    stripe.assert_made(1, 1)


def test_the_work_on_shards_is_told_as_it_goes_on(stack: ExitStack) -> None:
    stripe = Stripe(stack, shards())
    stripe.take(1)
    nbytes = stripe.records[1].bytes
    made = stripe.holder.rebuild(made_of(stripe.records, 1, 1), stripe.sources(1))
    assert stripe.holder.worked_bytes() == 3 * nbytes, "two were read, one was hashed"
    stripe.holder.record(made)
    # Without the padding, which the digests do not look at.
    assert stripe.holder.worked_bytes() == 5 * nbytes - 2 * 3 * 4


def test_a_share_goes_on_where_its_connection_broke(stack: ExitStack) -> None:
    records = shards(numels=(LONG, 1000, LONG))
    stripe = Stripe(stack, records)
    proxy = stack.enter_context(
        closing(Proxy(stripe.holder.address, pass_bytes=records[0].bytes + CHUNK_BYTES * 5 // 4))
    )
    stripe.workers[0].open(records[0], records[0].bytes, [proxy.address], None, STRIPE)
    stripe.take(1)
    for memory, record in zip(stripe.workers, records, strict=True):
        snap(memory, record, 2)
    assert proxy.reached.wait(30)
    for memory in stripe.workers[1:]:
        assert memory.wait_complete(2, 60)
    # All but one are there: that is nothing yet.
    assert {item.step for item in stripe.holder.held()} == {1}
    received = stripe.holder.stats()["received_bytes"]
    proxy.cut()
    stripe.settle(2)
    assert stripe.holder.stats()["received_bytes"] - received == records[0].bytes - CHUNK_BYTES
    for rank in STRIPE:
        stripe.assert_made(rank, 2)


def test_a_rank_killed_with_its_node_in_the_middle_of_its_share(stack: ExitStack) -> None:
    records = shards(numels=(1000, LONG, LONG))
    stripe = Stripe(stack, records)
    proxy = stack.enter_context(closing(Proxy(stripe.holder.address, pass_bytes=records[1].bytes * 3 // 2)))
    node = process(stack, "server")
    _, local_name = hear(node).split()
    stripe.workers[1] = worker(stack, local_name)
    stripe.workers[1].open(records[1], records[1].bytes, [proxy.address], None, STRIPE)
    stripe.take(1)
    for memory, record in zip(stripe.workers, records, strict=True):
        snap(memory, record, 2)
    assert proxy.reached.wait(30)
    for memory in (stripe.workers[0], stripe.workers[2]):
        assert memory.wait_complete(2, 60)
    kill(node)
    proxy.go.set()
    assert not stripe.workers[1].wait_complete(2, 30)
    # Half of its share was XORed into the parity of step 2, which therefore never counts.
    found = recoverable(
        {str(at): n.held() for at, n in ((0, stripe.nodes[0]), (2, stripe.nodes[2]), (3, stripe.holder))}
    )
    assert [(snapshot.step, snapshot.holders) for snapshot in found] == [(1, ("0", "3", "2"))]
    stripe.assert_made(1, 1)
    # The next generation continues with another stripe, and with the same holder.
    stripe.records = shards(2)
    stripe.workers[1] = worker(stack, stripe.nodes[1].local_name)
    stripe.open(stripe.holder.address, base=(1, 1))
    assert held(records[1], 1, replica=True) in stripe.holder.held()
    stripe.take(3)
    stripe.assert_made(1, 3, generation=2)


def test_the_holder_killed_while_shares_come(stack: ExitStack) -> None:
    records = shards(numels=(LONG, LONG, LONG))
    holder = process(stack, "server")
    port, _ = hear(holder).split()
    proxy = stack.enter_context(closing(Proxy(("127.0.0.1", int(port)), pass_bytes=records[0].bytes * 3 // 2)))
    stripe = Stripe(stack, records, to=proxy.address)
    stripe.take(1)
    for memory, record in zip(stripe.workers, records, strict=True):
        snap(memory, record, 2)
    assert proxy.reached.wait(30)
    kill(holder)
    proxy.go.set()
    late = next(memory for memory in stripe.workers if memory.complete() == 1)
    with late._changed:
        assert late._changed.wait_for(lambda: late._progress and late._progress.failed, 60)
    assert "accepts no parity of rank" in (late.failed() or "")
    # Every rank has its own: with all of them there, parity is not needed.
    found = recoverable({str(at): node.held() for at, node in enumerate(stripe.nodes)})
    assert [(snapshot.step, snapshot.holders) for snapshot in found] == [(2, ("0", "1", "2")), (1, ("0", "1", "2"))]
    stripe.records = shards(2)
    stripe.open(stripe.holder.address, base=(1, 2))
    stripe.take(3)
    stripe.assert_made(0, 3, generation=2)


def test_two_shards_of_one_stripe_are_more_than_parity_makes_good(stack: ExitStack) -> None:
    stripe = Stripe(stack, shards())
    stripe.take(1)
    assert recoverable({"0": stripe.nodes[0].held(), "3": stripe.holder.held()}) == ()
    with pytest.raises(IntegrityError, match=r"no node is known to hold the shards of ranks \[2\] \(rank 1, step 1"):
        stripe.holder.rebuild(made_of(stripe.records, 1, 1), {0: stripe.nodes[0].address})
    gone = stripe.nodes[2].address
    stripe.nodes[2].close()
    with pytest.raises(StorageError, match=f"127.0.0.1:{gone[1]}.*rank 2"):
        stripe.holder.rebuild(made_of(stripe.records, 1, 1), {0: stripe.nodes[0].address, 2: gone})
    with pytest.raises(IntegrityError, match="does not hold that shard any more"):
        stripe.holder.rebuild(made_of(stripe.records, 1, 2), stripe.sources(1))
    assert_no_stray_memory(stripe.holder)
    assert stripe.holder.stats()["replica_bytes"] == 0


def assert_no_stray_memory(node: SnapshotServer) -> None:
    with node._pool.changed:
        assert node._pool._segments.keys() == node._pool.table.buffers.keys()


@pytest.mark.parametrize("where", ["parity", "other"])
def test_changed_bytes_are_refused(stack: ExitStack, where: str) -> None:
    stripe = Stripe(stack, shards())
    stripe.take(1)
    if where == "parity":
        buffer = stripe.holder._pool.find(1, 1, 0, True, STRIPE)
        with stripe.holder._pool.segment(buffer.id).map() as view:
            view[17] ^= 1
        stripe.holder._pool.release(buffer)
    else:
        with stripe.nodes[2]._shards.reading(1, 1, 2) as reading, reading.segment.map() as view:
            view[17] ^= 1
    with pytest.raises(IntegrityError, match=r"does not match the hash of its rank \(rank 0, step 1"):
        stripe.holder.rebuild(made_of(stripe.records, 0, 1), stripe.sources(0))
    assert stripe.holder.stats()["replica_bytes"] == 0


def test_bytes_that_changed_on_their_way_are_not_xored_in(stack: ExitStack) -> None:
    node = server(stack)
    records = shards()
    data = [samples.content(record, 1) for record in records]

    def share(rank: int, found: bytes, last: str) -> None:
        with closing(connect(node.address, TOKEN)) as channel:
            sent = template_to_json(records[rank])
            channel.ask({"do": "open_parity", "ranks": [*STRIPE], "template": sent, "base": None})
            opened.wait(30)
            answer = channel.ask({"do": "share", "step": 1, "extra_state": None, "settled": None})
            assert answer == {"have": False, "begin": 0}
            channel.send_bytes(found + data[rank].tobytes())
            channel.ask({"do": "hash", "xxh3": last})

    opened = threading.Barrier(3)
    hashes = [chunk_hash(memoryview(part)) for part in data]
    wholes = [xxhash.xxh3_64(part).hexdigest() for part in data]
    threads = [threading.Thread(target=share, args=(rank, hashes[rank], wholes[rank])) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    with pytest.raises(ConnectionError):
        share(0, bytes(8), wholes[0])
    for thread in threads:
        thread.join(30)
    assert node.held() == ()
    opened = threading.Barrier(1)
    share(0, hashes[0], wholes[0])
    buffer = node._pool.find(1, 1, 0, True, STRIPE)
    with node._pool.segment(buffer.id).map() as view:
        assert np.array_equal(np.frombuffer(view, np.uint8), data[0] ^ data[1] ^ data[2])
    node._pool.release(buffer)


def test_a_shard_that_is_not_what_its_rank_says_makes_the_parity_void(stack: ExitStack) -> None:
    node = server(stack)
    records = shards()
    channels = [stack.enter_context(closing(connect(node.address, TOKEN))) for _ in records]
    for channel, record in zip(channels, records, strict=True):
        channel.ask({"do": "open_parity", "ranks": [*STRIPE], "template": template_to_json(record), "base": None})
    for rank, channel in enumerate(channels):
        data = samples.content(records[rank], 1)
        channel.ask({"do": "share", "step": 1, "extra_state": None, "settled": None})
        channel.send_bytes(chunk_hash(memoryview(data)) + data.tobytes())
        if rank < 2:
            channel.ask({"do": "hash", "xxh3": xxhash.xxh3_64(data).hexdigest()})
        else:
            with pytest.raises(IntegrityError, match="its stripe has no parity of this step"):
                channel.ask({"do": "hash", "xxh3": "0" * 16})
    assert node.held() == ()


def test_who_is_first_waits_for_the_sizes_of_the_others(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    stripe = Stripe(stack, shards(), to=server(stack).address)
    first, *others = stripe.workers
    first.open(stripe.records[0], stripe.records[0].bytes, [stripe.holder.address], None, STRIPE)
    snap(first, stripe.records[0], 1)
    for memory, record in zip(others, stripe.records[1:], strict=True):
        memory.open(record, record.bytes, [stripe.holder.address], None, STRIPE)
        snap(memory, record, 1)
    stripe.settle(1)
    monkeypatch.setattr(parity, "_MEMBERS_LIMIT_S", 0.01)
    record = template(0, 3, 2)
    first.open(record, record.bytes, [stripe.holder.address], None, STRIPE)
    snap(first, record, 2)
    with first._changed:
        assert first._changed.wait_for(lambda: first._progress and first._progress.failed, 30)
    assert "parity of step 2 cannot start: the shards of ranks 1, 2 are not known yet" in (first.failed() or "")


def test_memory_for_parity_is_asked_for_at_the_start(stack: ExitStack) -> None:
    record = template(0, 3)
    node, holder = server(stack), server(stack, 3 * record.bytes - 1)
    memory = worker(stack, node.local_name)
    memory.open(record, record.bytes, [holder.address], None, STRIPE)
    with memory._changed:
        assert memory._changed.wait_for(lambda: memory._progress and memory._progress.failed, 30)
    assert "snapshots of parity of ranks 0, 1, 2 need 3 x 0.00 GiB in this node's memory" in (memory.failed() or "")
    assert holder.stats()["lines"] == 0
    holder._pool.limit_bytes = 3 * record.bytes
    with memory._changed:
        assert memory._changed.wait_for(lambda: memory._progress and not memory._progress.failed, 30)
    # A longer one does not fit, and does not turn out the one that does.
    longer = template(1, 3, numel=2000)
    other = worker(stack, server(stack).local_name)
    other.open(longer, longer.bytes, [holder.address], None, STRIPE)
    with other._changed:
        assert other._changed.wait_for(lambda: other._progress and other._progress.failed, 30)
    key = next(iter(holder._pool.table.shards))
    assert holder._pool.table.unknown(key) == [1, 2]


def test_a_stripe_must_make_sense(stack: ExitStack) -> None:
    node = server(stack)
    with closing(connect(node.address, TOKEN)) as channel:
        for ranks in ([], [0], [1, 2], [0, 3]):
            with pytest.raises(IntegrityError, match="is not a valid stripe that contains this rank"):
                channel.ask(
                    {"do": "open_parity", "ranks": ranks, "template": template_to_json(template(0, 3)), "base": None}
                )
        with pytest.raises(IntegrityError, match="before its shard was opened"):
            channel.ask({"do": "share", "step": 1, "extra_state": None, "settled": None})
    memory = worker(stack, node.local_name)
    with pytest.raises(UsageError, match="but 5 were requested"):
        memory.open(template(0, 3), 5, [node.address], None, STRIPE)


def test_many_generations_leave_nothing_behind(stack: ExitStack) -> None:
    stripe = Stripe(stack, shards())
    stripe.take(1)
    before: tuple[int, int, int] | None = None
    for generation in range(2, 62):
        numels = tuple(1 + (generation * 7919 + rank * 104_729) % 30_000 for rank in STRIPE)
        if generation % 3 == 0:  # one is made of parity, and the generation begins with it
            stripe.assert_made(generation % 2, generation * 2 - 1, generation - 1)
        stripe.records = shards(generation, numels)
        stripe.open(stripe.holder.address, (generation - 1, generation * 2 - 1) if generation % 3 == 0 else None)
        for step in (generation * 2, generation * 2 + 1):
            stripe.take(step)
        if generation == 10:
            before = used()
    assert {item.generation for item in stripe.holder.held()} == {61}
    stats = stripe.holder.stats()
    assert (stats["segments"], stats["lines"], stats["connections"]) == (2, 1, 3)
    assert before is not None
    fds, threads, segments = used()
    # At most: descriptors of tests before this one may still have been open at the first count.
    assert fds <= before[0]
    assert segments <= before[2]
    assert threads <= before[1] + 3  # senders of an older generation may be about to end
