"""A server and its workers in one process: what is written, replicated, held, checked and read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import memory_samples as samples
import pytest
import torch
from memory_samples import TOKEN, held, snap, take, template

from elastic.checkpoint.memory.client import NodeMemory
from elastic.checkpoint.memory.server import MemoryServer
from elastic.checkpoint.memory.source import Holder, MemorySource
from elastic.checkpoint.source import ReadRange
from elastic.core.assembly import assemble
from elastic.core.manifest import Manifest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def server(stack: ExitStack, limit_bytes: int | None = None) -> MemoryServer:
    started = samples.server(limit_bytes)
    stack.callback(started.close)
    return started


def worker(stack: ExitStack, node: MemoryServer) -> NodeMemory:
    memory = NodeMemory(node.local_name, TOKEN)
    stack.callback(memory.close)
    return memory


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
        read_all(source, manifest, records, 3)


def assembled(nodes: list[MemoryServer], step: int) -> Manifest:
    found = [node.record(item) for node in nodes for item in node.held() if item.step == step and not item.replica]
    return assemble(found, run_id="run")


def read_all(source: MemorySource, manifest: Manifest, records: list[object], step: int) -> None:
    ranges, expected = [], []
    for shard in manifest.shards:
        tensors = samples.tensors(replace(shard, digests={}), step)
        for key, tensor in tensors.items():
            for low, high in ((0, 100), (500, 501), (101, 499), (700, tensor.numel())):
                ranges.append(ReadRange(shard.rank, key, low, high - low, torch.zeros(high - low)))
                expected.append(tensor[low:high])
    nbytes = source.read(manifest, ranges)
    assert nbytes == sum(item.numel for item in ranges) * 4
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
