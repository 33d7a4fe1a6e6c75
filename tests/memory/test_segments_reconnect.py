"""A worker whose connection to its node's memory breaks: it continues over another one, with everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import memory_samples as samples
import pytest
from memory_proxy import Proxy
from memory_samples import TOKEN, held, snap, take, template
from test_segments_kills import hear, kill, process

from elastic.checkpoint.memory.messages import BeginSnapshot, CommitSnapshot, OpenShard, SettleSnapshot, WorkerRequest
from elastic.checkpoint.memory.server.sessions import WorkerSession
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.core.errors import StorageError

NUMEL = 200_000  # 1.6 MB of two kinds: more than what lies in socket buffers of the proxy
SHARD = template(0, 1, numel=NUMEL)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def server(stack: ExitStack) -> SnapshotServer:
    return stack.enter_context(closing(samples.server()))


def worker(stack: ExitStack, local_name: str) -> SnapshotClient:
    return stack.enter_context(closing(SnapshotClient(local_name, TOKEN)))


def cut(memory: SnapshotClient) -> None:
    """Its connection breaks; returns when the next one is there, or will not be."""
    link = memory._link
    link._channel.shut()
    link.join()


def test_one_reset_does_not_end_snapshots_in_memory(stack: ExitStack) -> None:
    node = process(stack, "server")
    _, local_name = hear(node).split()
    other = server(stack)
    memory = worker(stack, local_name)
    memory.open(SHARD, SHARD.bytes, [other.address])
    take(memory, SHARD, 1)
    cut(memory)
    assert memory.failed() is None
    assert memory.complete() == 1
    assert memory.ready()
    take(memory, SHARD, 2)
    take(memory, SHARD, 3)
    assert set(other.held()) == {held(SHARD, 2, replica=True), held(SHARD, 3, replica=True)}
    kill(node)
    assert not memory.wait_complete(4, 30)
    with pytest.raises(StorageError, match="reconnecting failed: "):
        memory.segment()


def test_what_is_being_written_is_written_on(stack: ExitStack) -> None:
    node = server(stack)
    memory = worker(stack, node.local_name)
    memory.open(SHARD, SHARD.bytes, [])
    for step in (1, 2, 3):
        view, wanted = memory.segment(), memoryview(samples.content(SHARD, step))
        half = len(view) // 2
        view[:half] = wanted[:half]
        cut(memory)
        view[half:] = wanted[half:]
        memory.commit(step, {"cursor": step})
        assert memory.wait_complete(step, 30)
        memory.settled(step)
        assert node.record(held(SHARD, step)) == samples.full_record(SHARD, step)
    assert node.stats()["segments"] == 2


def test_a_replica_that_was_under_way_arrives(stack: ExitStack) -> None:
    node, other = server(stack), server(stack)
    proxy = stack.enter_context(closing(Proxy(other.address, pass_bytes=SHARD.bytes * 3 // 2)))
    memory = worker(stack, node.local_name)
    memory.open(SHARD, SHARD.bytes, [proxy.address])
    take(memory, SHARD, 1)
    snap(memory, SHARD, 2)
    assert proxy.reached.wait(30)
    (first,) = node._replications
    cut(memory)
    # What is left of the first connection does not send the same concurrently with the second.
    assert all(sender._stopped for sender in first._senders)
    proxy.go.set()
    assert memory.wait_complete(2, 30), memory.failed()
    memory.settled(2)
    assert other.record(held(SHARD, 2, replica=True)) == samples.full_record(SHARD, 2)
    take(memory, SHARD, 3)


@pytest.mark.parametrize("lost", [OpenShard, BeginSnapshot, CommitSnapshot, SettleSnapshot])
def test_an_answer_that_was_lost_changes_nothing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, lost: type[WorkerRequest]
) -> None:
    node, other = server(stack), server(stack)
    memory = worker(stack, node.local_name)
    handle, losses = WorkerSession._handle, 1

    def answered(self: WorkerSession, request: WorkerRequest) -> None:
        nonlocal losses
        if isinstance(request, lost) and losses:
            losses -= 1
            monkeypatch.setattr(self, "_answer", lambda *_: self._channel.shut())
        handle(self, request)

    monkeypatch.setattr(WorkerSession, "_handle", answered)
    memory.open(SHARD, SHARD.bytes, [other.address])
    for step in (1, 2, 3):
        take(memory, SHARD, step)
    assert losses == 0
    assert set(other.held()) == {held(SHARD, 2, replica=True), held(SHARD, 3, replica=True)}
    for step in (2, 3):
        assert node.record(held(SHARD, step)) == samples.full_record(SHARD, step)


def test_a_connection_that_breaks_again_and_again_is_given_up_until_the_next_generation(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = server(stack)
    memory = worker(stack, node.local_name)
    memory.open(SHARD, SHARD.bytes, [])
    take(memory, SHARD, 1)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerSession, "_handle", lambda self, message: self._channel.shut())
        with pytest.raises(StorageError, match="reconnecting failed"):
            memory.segment()
        assert "cannot be reached" in (memory.failed() or "")
        with pytest.raises(StorageError):
            memory.complete()
    with pytest.raises(StorageError, match="gone"):
        memory.segment()
    after = template(0, 1, 2, NUMEL)
    memory.open(after, after.bytes, [], base=(1, 1))
    assert memory.failed() is None
    take(memory, after, 2)
    assert node.held() == (held(after, 2),)
