"""A server and its workers in one process: what is written, replicated, held, checked and read back."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import memory_samples as samples
import pytest
import torch
from memory_proxy import SlowProxy
from memory_samples import TOKEN, held, snap, take, template

from elastic.checkpoint.memory.server import segment_pool, sender
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.checkpoint.memory.source import Holder, MemorySource, nearest
from elastic.checkpoint.source import BytesRead, ReadRange
from elastic.core.checkpoint.assembly import assemble
from elastic.core.checkpoint.manifest import Manifest, ShardRecord
from elastic.core.errors import GenerationEnded, IntegrityError, StorageError, UsageError
from elastic.transport.handshake import connect


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def server(stack: ExitStack, limit_bytes: int | None = None) -> SnapshotServer:
    started = samples.server(limit_bytes)
    stack.callback(started.close)
    return started


def worker(stack: ExitStack, node: SnapshotServer) -> SnapshotClient:
    memory = SnapshotClient(node.local_name, TOKEN)
    stack.callback(memory.close)
    return memory


def holder_of_much(stack: ExitStack) -> tuple[SnapshotServer, ShardRecord, Manifest]:
    """A node with the shard of the one rank in its memory, of more than is sent at once."""
    node = server(stack)
    memory = worker(stack, node)
    record = template(0, 1, 1, 200_000)
    memory.open(record, record.bytes, [])
    take(memory, record, 1)
    return node, record, assemble([samples.full_record(record, 1)], run_id="run")


def test_two_nodes_hold_each_others_replicas(stack: ExitStack) -> None:
    nodes = [server(stack), server(stack)]
    records = [template(rank) for rank in range(2)]
    workers = [worker(stack, node) for node in nodes]
    for rank, memory in enumerate(workers):
        memory.open(records[rank], records[rank].bytes, [nodes[1 - rank].address])
    for step in (1, 2, 3):
        for rank, memory in enumerate(workers):
            assert memory.ready()
            snap(memory, records[rank], step)
            assert not memory.ready()
        for memory in workers:
            assert memory.wait_complete(step, 30)
            assert memory.complete() == step
            assert memory.failed() is None
        for memory in workers:
            memory.settled(step)
    for rank, node in enumerate(nodes):
        own = {held(records[rank], step) for step in (2, 3)}
        replicas = {held(records[1 - rank], step, replica=True) for step in (2, 3)}
        assert set(node.held()) == own | replicas
        for item in node.held():
            assert node.record(item) == samples.full_record(records[item.rank], item.step)
    manifest = assembled(nodes, 3)
    for local in (None, nodes[0].local_name):
        source = MemorySource(
            lambda _: manifest,
            {0: Holder(nodes[0].address, local), 1: Holder(nodes[0].address, local)},
            TOKEN,
            timeout_s=30,
        )
        read_all(source, manifest, records, 3, "own_node" if local else "network")


def assembled(nodes: list[SnapshotServer], step: int) -> Manifest:
    found = [node.record(item) for node in nodes for item in node.held() if item.step == step and not item.replica]
    return assemble(found, run_id="run")


def read_all(source: MemorySource, manifest: Manifest, records: list[object], step: int, place: str) -> None:
    ranges, expected = [], []
    for shard in manifest.shards:
        tensors = samples.tensors(replace(shard, digests={}), step)
        for key, tensor in tensors.items():
            for low, high in ((0, 100), (500, 501), (101, 499), (700, tensor.numel())):
                ranges.append(ReadRange(shard.rank, key, low, high - low, torch.zeros(high - low)))
                expected.append(tensor[low:high])
    read = source.read(manifest, ranges)
    assert read == BytesRead(**{place: sum(item.numel for item in ranges) * 4})
    for item, values in zip(ranges, expected, strict=True):
        assert torch.equal(item.target.view(torch.int32), values.view(torch.int32))


def test_a_new_generation_takes_the_place_of_the_old_one_when_it_has_settled(stack: ExitStack) -> None:
    node, other = server(stack), server(stack)
    memory = worker(stack, node)
    old, new = template(0, 1, 1, 1000), template(0, 1, 2, 700)
    memory.open(old, old.bytes, [other.address])
    take(memory, old, 1)
    take(memory, old, 2)
    memory.open(new, new.bytes, [other.address])
    snap(memory, new, 3)
    assert memory.wait_complete(3, 30)
    assert set(node.held()) == {held(old, 1), held(old, 2), held(new, 3)}
    memory.settled(3)
    assert set(node.held()) == {held(new, 3)}
    take(memory, new, 4)  # carries the mark of step 3
    assert set(other.held()) == {held(new, 3, replica=True), held(new, 4, replica=True)}


def where(memory: SnapshotClient) -> int:
    """The address of the memory that is given next."""
    return torch.frombuffer(memory.segment(), dtype=torch.uint8).data_ptr()


class Pinned:
    """What a driver knows of a worker's memory, by address."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.made = 0

    def pin(self, memory: memoryview) -> Callable[[], None]:
        self.made += 1
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self.sizes[address] = len(memory)
        return lambda: self.sizes.__delitem__(address)


@pytest.mark.parametrize("numel", [1000, 700])
def test_a_generation_writes_into_the_memory_that_the_last_one_had_mapped(stack: ExitStack, numel: int) -> None:
    """12 GB are mapped and registered with a driver in seconds, on the training thread."""
    node, other, pinned = server(stack), server(stack), Pinned()
    memory = SnapshotClient(node.local_name, TOKEN, pinned.pin)
    stack.callback(memory.close)
    first, places = template(0, 1, 1), list[int]()
    memory.open(first, first.bytes, [other.address])
    for step in (1, 2):
        places.append(where(memory))
        take(memory, first, step)
    for generation, step in ((2, 3), (3, 5)):
        again = template(0, 1, generation, numel)
        memory.open(again, again.bytes, [other.address], base=(generation - 1, step - 1))
        assert held(template(0, 1, generation - 1, numel), step - 1) in node.held(), "what was restored stays"
        for later in (step, step + 1):
            assert where(memory) in places
            take(memory, again, later)
            assert node.record(held(again, later)) == samples.full_record(again, later)
    assert (pinned.made, sorted(pinned.sizes)) == (2, sorted(places))
    assert node.stats()["segments"] == 2
    memory.close()
    assert pinned.sizes == {}


def test_memory_that_is_too_small_for_the_next_generation_is_let_go_of_at_once(stack: ExitStack) -> None:
    node, pinned = server(stack), Pinned()
    memory = SnapshotClient(node.local_name, TOKEN, pinned.pin)
    stack.callback(memory.close)
    first, larger = template(0, 1, 1), template(0, 1, 2, 1500)
    memory.open(first, first.bytes, [])
    for step in (1, 2):
        take(memory, first, step)
    memory.open(larger, larger.bytes, [], base=(1, 2))
    assert pinned.sizes == {}
    assert node.stats()["segments"] == 1, "the snapshot that was restored"
    for step in (3, 4):
        take(memory, larger, step)
    assert sorted(pinned.sizes.values()) == [larger.bytes] * 2
    assert node.stats()["segments"] == 2


def test_memory_into_which_a_device_may_still_write_is_given_to_nobody(stack: ExitStack) -> None:
    node, pinned = server(stack), Pinned()
    memory = SnapshotClient(node.local_name, TOKEN, pinned.pin)
    stack.callback(memory.close)
    first, again = template(0, 1, 1), template(0, 1, 2)
    memory.open(first, first.bytes, [])
    late = memory.segment()
    memory.commit(1, {})
    memory.abandon()
    memory.open(again, again.bytes, [])
    take(memory, again, 2)
    late[:] = bytes(len(late))
    assert node.record(held(again, 2)) == samples.full_record(again, 2)
    assert len(pinned.sizes) == 2, "it stays registered"


def test_a_worker_that_has_gone_keeps_no_memory(stack: ExitStack) -> None:
    node = server(stack)
    record, after = template(0, 1), template(0, 1, 2)
    memory = SnapshotClient(node.local_name, TOKEN)
    memory.open(record, record.bytes, [])
    take(memory, record, 1)
    memory.close()
    other = worker(stack, node)
    other.open(after, after.bytes, [], base=(1, 1))
    take(other, after, 2)
    take(other, after, 3)
    assert node.stats()["segments"] == 2


def pair(stack: ExitStack, **limits: int) -> tuple[SnapshotServer, SnapshotServer, SnapshotClient]:
    node, other = server(stack), server(stack, **limits)
    return node, other, worker(stack, node)


def wait_failed(memory: SnapshotClient) -> str:
    with memory._changed:
        assert memory._changed.wait_for(lambda: memory._progress and memory._progress.failed, 30)
    failed = memory.failed()
    assert failed is not None
    return failed


def test_a_node_without_the_memory_says_so_at_once(stack: ExitStack) -> None:
    record = template(0, 2)
    node = server(stack, 2 * record.bytes - 1)
    memory = worker(stack, node)
    with pytest.raises(UsageError, match=r"rank 0 need 2 x 0\.00 GiB in this node's memory, but .* are available"):
        memory.open(record, record.bytes, [])
    assert node.stats()["lines"] == 0


def test_replicas_count_too(stack: ExitStack) -> None:
    own, foreign = template(0, 2), template(1, 2)
    node = server(stack, 3 * own.bytes)
    other = worker(stack, server(stack))
    other.open(foreign, foreign.bytes, [node.address])
    take(other, foreign, 1)
    memory = worker(stack, node)
    with pytest.raises(UsageError, match="with what it holds for other ranks"):
        memory.open(own, own.bytes, [])


def test_a_holder_without_the_memory_is_named_and_tried_again(stack: ExitStack) -> None:
    record = template(0, 1)
    node, other, memory = pair(stack, limit_bytes=record.bytes)
    memory.open(record, record.bytes, [other.address])
    failed = wait_failed(memory)
    assert failed.startswith(
        f"127.0.0.1:{other.address[1]} accepts no replica of rank 0: snapshots of replica of rank 0"
    )
    snap(memory, record, 1)
    assert node.held() == (held(record, 1),)
    assert memory.complete() == -1
    other._pool.limit_bytes = 10 * record.bytes
    assert memory.wait_complete(1, 30)
    assert memory.failed() is None


def test_damage_of_a_snapshot_without_replicas_is_found(stack: ExitStack) -> None:
    record = template(0, 1)
    node = server(stack)
    memory = worker(stack, node)
    memory.open(record, record.bytes, [])
    take(memory, record, 1)
    with node._shards.reading(1, 1, 0, False) as reading, reading.segment.map() as view:
        view[17] ^= 1
    with pytest.raises(IntegrityError, match="does not match its hash"):
        node.record(held(record, 1))


def test_a_holder_that_never_has_the_memory_is_given_up_aloud(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "GIVE_UP_S", 0.0)
    record = template(0, 1)
    _, other, memory = pair(stack, limit_bytes=record.bytes)
    memory.open(record, record.bytes, [other.address])
    wait_lost(memory)
    with pytest.raises(UsageError, match=f"127.0.0.1:{other.address[1]} accepts no replica of rank 0: .*need 2 x"):
        memory.complete()
    again = template(0, 1, 2)
    other._pool.limit_bytes = 10 * record.bytes
    memory.open(again, again.bytes, [other.address])
    take(memory, again, 1)
    assert memory.complete() == 1, "a new generation begins anew"


def test_a_holder_that_is_out_of_reach_is_given_up_aloud(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "GIVE_UP_S", 0.0)
    record = template(0, 1)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    memory = worker(stack, server(stack))
    memory.open(record, record.bytes, [address])
    wait_lost(memory)
    with pytest.raises(StorageError, match=f"127.0.0.1:{address[1]} accepts no replica of rank 0: .*refused"):
        memory.complete()


def test_a_snapshot_that_cannot_be_sent_does_not_end_replication(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped or damaged meanwhile; the next one is sent to the same holder."""
    record, send, failures = template(0, 1), sender.send_replica, iter([True])

    def damaged_once(*arguments: Any) -> str:
        if next(failures, False):
            raise IntegrityError("the snapshot is not what was committed")
        return send(*arguments)

    monkeypatch.setattr(sender, "send_replica", damaged_once)
    _, other, memory = pair(stack, limit_bytes=10 * record.bytes)
    memory.open(record, record.bytes, [other.address])
    take(memory, record, 1)
    snap(memory, record, 2)
    assert memory.wait_complete(2, 30)
    assert memory.failed() is None


def wait_lost(memory: SnapshotClient) -> None:
    with memory._changed:
        assert memory._changed.wait_for(lambda: memory._progress and memory._progress.lost, 30)


def test_a_reader_keeps_its_copy(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    record = template(0, 1)
    node = server(stack)
    memory = worker(stack, node)
    memory.open(record, record.bytes, [])
    take(memory, record, 1)
    take(memory, record, 2)
    monkeypatch.setattr(segment_pool, "READER_LIMIT_S", 0.01)
    with node._shards.reading(1, 1, 0) as reading:
        with pytest.raises(StorageError, match="has been read for"):
            memory.segment()
        with reading.segment.map() as view:
            assert view == memoryview(samples.content(record, 1))
    take(memory, record, 3)
    with node._shards.reading(1, 2, 0) as reading:
        new = template(0, 1, 2)
        memory.open(new, new.bytes, [])
        take(memory, new, 4)
        assert node.held() == (held(new, 4),)
        with reading.segment.map() as view:  # not held any more, but not gone under its reader
            assert view == memoryview(samples.content(record, 2))
    assert node.stats()["own_bytes"] <= 2 * new.bytes


def test_reads_while_new_snapshots_come(stack: ExitStack) -> None:
    node, other, memory = pair(stack)
    record = template(0, 1, numel=20_000)
    memory.open(record, record.bytes, [other.address])
    ended, good, wrong = threading.Event(), [0, 0], []

    def read(which: int, holder: Holder) -> None:
        while not ended.is_set():
            step = memory.complete()
            if step < 1:
                continue
            manifest = assemble([replace(samples.full_record(record, step), extra_state=None)], run_id="run")
            targets = {t.key: torch.zeros(t.numel) for t in record.tensors}
            ranges = [ReadRange(0, key, 0, len(target), target) for key, target in targets.items()]
            try:
                MemorySource(never, {0: holder}, TOKEN, timeout_s=30).read(manifest, ranges)
            except IntegrityError:  # overwritten before it was read
                continue
            expected = samples.tensors(record, step)
            same = all(torch.equal(targets[k].view(torch.int32), expected[k].view(torch.int32)) for k in targets)
            good[which] += same
            wrong.extend([] if same else [step])

    holders = [Holder(node.address, node.local_name), Holder(other.address)]
    threads = [threading.Thread(target=read, args=(number, holder)) for number, holder in enumerate(holders)]
    for thread in threads:
        thread.start()
    step = 0
    while min(good) < 5 and not wrong and step < 5000:
        step += 1
        take(memory, record, step)
    ended.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert min(good) >= 5


def never(checkpoint_id: str) -> Manifest:
    raise AssertionError("the manifest was given")


def test_changed_bytes_are_refused(stack: ExitStack) -> None:
    node, other, memory = pair(stack)
    record = template(0, 1)
    memory.open(record, record.bytes, [other.address])
    take(memory, record, 1)
    for holder, replica in ((node, False), (other, True)):
        with holder._shards.reading(1, 1, 0, replica) as reading, reading.segment.map() as view:
            view[17] ^= 1
        with pytest.raises(
            IntegrityError, match=r"does not match its hash: the memory was damaged \(rank 0, step 1, generation 1\)"
        ):
            holder.record(held(record, 1, replica=replica))
        assert holder.record(held(record, 1, replica=replica), digests=False).digests == {}


def test_a_reader_asks_its_own_node_and_readers_of_other_nodes_are_spread_over_the_copies() -> None:
    copies = ("10.0.0.1", 7), ("10.0.0.2", 7)
    assert nearest(copies, copies[1], "local", 3) == Holder(copies[1], "local")
    asked = Counter(nearest(copies, ("10.0.1.1", port), "local", 3) for port in range(100))
    assert asked.keys() == {Holder(copies[0]), Holder(copies[1])}
    assert min(asked.values()) > 30


def test_what_is_not_held_is_not_read(stack: ExitStack) -> None:
    node = server(stack)
    memory = worker(stack, node)
    record = template(0, 1)
    memory.open(record, record.bytes, [])
    take(memory, record, 1)
    manifest = assemble([samples.full_record(record, 2)], run_id="run")
    target = torch.zeros(10)
    for local in (None, node.local_name):
        source = MemorySource(lambda _: manifest, {0: Holder(node.address, local)}, TOKEN, timeout_s=30)
        with pytest.raises(IntegrityError, match="does not hold that shard any more"):
            source.read(manifest, [ReadRange(0, "fp32/flat", 0, 10, target)])
    with pytest.raises(IntegrityError, match="no node is known"):
        MemorySource(lambda _: manifest, {}, TOKEN, timeout_s=30).read(
            manifest, [ReadRange(0, "fp32/flat", 0, 10, target)]
        )
    with pytest.raises(IntegrityError, match="does not hold"):
        node.record(held(record, 2))


@pytest.mark.parametrize("nearby", [True, False], ids=["own node", "network"])
def test_rows_of_a_shard_arrive_together(stack: ExitStack, nearby: bool) -> None:
    """More than are packed at once, and a row that the last byte of the shard ends."""
    node, record, manifest = holder_of_much(stack)
    stored = torch.from_numpy(samples.content(record, 1).copy())[record.tensors[0].begin :].view(torch.int32)
    numel, width, stride = record.tensors[0].numel, 3, 7
    rows = (numel - width) // stride + 1
    offset = numel - width - (rows - 1) * stride
    target = torch.zeros(rows * width)
    holder = Holder(node.address, node.local_name if nearby else None)
    source = MemorySource(lambda _: manifest, {0: holder}, TOKEN, timeout_s=30)
    found = source.read(manifest, [ReadRange(0, "fp32/flat", offset, width, target, rows, stride)])
    assert found.total == target.nbytes, "what lies between them was not read"
    assert torch.equal(
        target.view(torch.int32).view(rows, width), stored[offset:numel].as_strided((rows, width), (stride, 1))
    )
    for wrong in ((offset + 1, stride, f"has {numel} elements"), (offset, 2, "rows of 3 elements .* are 2 apart")):
        with pytest.raises(IntegrityError, match=wrong[2]):
            source.read(manifest, [ReadRange(0, "fp32/flat", wrong[0], width, target, rows, wrong[1])])


@pytest.mark.parametrize(
    "part",
    [
        [-1, 5, 1, 0], [0, 10**9, 1, 0], [8023, 2, 1, 0], [10**30, 1, 1, 0], [5, -5, 1, 0],
        [0, 8, 1004, 8], [0, 8, 2, 4], [0, 0, 2, 8], [0, 8, 0, 0], [0, 1, 10**9, 1],
    ],
)  # fmt: skip
def test_bytes_outside_of_a_shard_are_not_given(stack: ExitStack, part: list[int]) -> None:
    node = server(stack)
    memory = worker(stack, node)
    record = template(0, 1)
    assert record.bytes == 8024
    memory.open(record, record.bytes, [])
    take(memory, record, 1)
    with closing(connect(node.address, TOKEN)) as channel:
        request = {"do": "read", "generation": 1, "step": 1, "rank": 0}
        with pytest.raises(IntegrityError, match=r"are not in 8024|is not a whole number|rows of .* bytes that are"):
            channel.ask({**request, "parts": [[0, 8, 1, 0], part]})
        assert channel.ask({**request, "parts": [[8000, 24, 1, 0]]}) == {}
        assert channel.exactly(24) == samples.content(record, 1)[8000:].tobytes()


def test_a_holder_that_is_gone_or_stands_still_is_named(stack: ExitStack) -> None:
    record = template(0, 1)
    manifest = assemble([samples.full_record(record, 1)], run_id="run")
    ranges = [ReadRange(0, "fp32/flat", 0, 10, torch.zeros(10))]
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    address = ("127.0.0.1", silent.getsockname()[1])
    with pytest.raises(StorageError, match=f"127.0.0.1:{address[1]} .*rank 0"):
        MemorySource(lambda _: manifest, {0: Holder(address)}, TOKEN, timeout_s=0.05).read(manifest, ranges)
    silent.close()
    with pytest.raises(StorageError, match=f"127.0.0.1:{address[1]} .*refused.*rank 0"):
        MemorySource(lambda _: manifest, {0: Holder(address)}, TOKEN, timeout_s=30).read(manifest, ranges)
    with pytest.raises(StorageError, match="cannot be reached"):
        SnapshotClient("elastic-memory-nobody", TOKEN)


def test_a_holder_may_take_its_time_as_long_as_it_moves_and_the_read_is_wanted(stack: ExitStack) -> None:
    node, record, manifest = holder_of_much(stack)
    numel = record.tensors[0].numel
    # Every chunk comes within the limit, all of them together do not.
    slow = stack.enter_context(closing(SlowProxy(node.address, chunks=16, pause_s=0.2)))
    wanted, found = torch.zeros(numel), torch.zeros(numel)
    ranges = [ReadRange(0, record.tensors[0].key, 0, numel, wanted)]
    MemorySource(lambda _: manifest, {0: Holder(node.address)}, TOKEN, timeout_s=30).read(manifest, ranges)
    ranges = [ReadRange(0, record.tensors[0].key, 0, numel, found)]
    MemorySource(lambda _: manifest, {0: Holder(slow.address)}, TOKEN, timeout_s=2.0).read(manifest, ranges)
    # Bits: some of the numbers are none.
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    # As a whole it takes longer than `limit_s`, which is a limit on bytes that do not move.
    moved: list[int] = []
    source = MemorySource(lambda _: manifest, {0: Holder(slow.address)}, TOKEN, timeout_s=0.5, limit_s=1.5,
                          moved=moved.append)  # fmt: skip
    source.read(manifest, ranges)
    assert sum(moved) >= wanted.nbytes
    assert len(moved) > 1
    with pytest.raises(StorageError, match=r"has sent no byte of its part of a snapshot for 0\.3 s"):
        MemorySource(lambda _: manifest, {0: Holder(slow.address)}, TOKEN, timeout_s=2.0, limit_s=0.3).read(
            manifest, ranges
        )

    def over() -> None:
        raise GenerationEnded(1, "it is over")

    with pytest.raises(GenerationEnded):
        MemorySource(lambda _: manifest, {0: Holder(slow.address)}, TOKEN, timeout_s=30, check=over).read(
            manifest, ranges
        )


def test_two_hundred_generations_leave_nothing_behind(stack: ExitStack) -> None:
    nodes = [server(stack), server(stack)]
    workers = [worker(stack, node) for node in nodes]
    shm = set(os.listdir("/dev/shm"))
    before: tuple[int, int, int] | None = None
    for generation in range(1, 211):
        numel = 1000 + generation * 7919 % 50_000  # growing and shrinking
        for rank, memory in enumerate(workers):
            record = template(rank, 2, generation, numel)
            base = (generation - 1, generation * 3 - 1) if generation % 3 == 0 else None
            memory.open(record, record.bytes, [nodes[1 - rank].address], base)
        for step in range(generation * 3, generation * 3 + 3 - generation % 2):
            for rank, memory in enumerate(workers):
                snap(memory, template(rank, 2, generation, numel), step)
            for memory in workers:
                assert memory.wait_complete(step, 30)
            for memory in workers:
                memory.settled(step)
        if generation == 10:
            before = used()
    for node in nodes:
        assert {item.generation for item in node.held()} == {210}
        assert node.stats()["segments"] == 4
        assert node.stats()["lines"] == 2
        assert node.stats()["connections"] == 2
    assert before is not None
    fds, threads, segments = used()
    # Less: what tests before this one have opened may be closed meanwhile.
    assert fds <= before[0]
    assert segments == before[2]
    assert threads <= before[1] + 2  # a sender of an older generation may be about to end
    assert set(os.listdir("/dev/shm")) - shm == set()


def used() -> tuple[int, int, int]:
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    maps = Path("/proc/self/maps").read_text().count("memfd:elastic-snapshot")
    return sum("elastic-snapshot" in link or "socket" in link for link in links), threading.active_count(), maps


def test_closing_ends_everything() -> None:
    threads = set(threading.enumerate())
    node, other = samples.server(), samples.server()
    memory = SnapshotClient(node.local_name, TOKEN)
    record = template(0, 1)
    memory.open(record, record.bytes, [other.address])
    take(memory, record, 1)
    node.close()
    node.close()
    with pytest.raises(StorageError, match="gone"):
        memory.segment()
    assert not memory.wait_complete(2, 30)
    memory.close()
    memory.close()
    other.close()
    assert node.held() == ()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)  # it has done its work, and may not have returned yet
        assert not thread.is_alive(), thread.name
