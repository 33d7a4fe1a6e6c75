"""Processes that are killed in the middle of something: nothing that is incomplete ever looks complete."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import memory_samples as samples
import pytest
from memory_proxy import Proxy
from memory_samples import TOKEN, held, snap, take, template

from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.core.errors import StorageError

NUMEL = 200_000  # 1.6 MB of two kinds: more than what lies in socket buffers of the proxy
SHARD = template(0, 1, numel=NUMEL)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def process(stack: ExitStack, *args: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("memory_process.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = stack.enter_context(
        subprocess.Popen([sys.executable, script, *args], stdin=-1, stdout=-1, text=True, env=environment)
    )
    stack.callback(started.kill)
    return started


def hear(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def tell(started: subprocess.Popen[str], what: str) -> None:
    assert started.stdin is not None
    started.stdin.write(f"{what}\n")
    started.stdin.flush()


def kill(started: subprocess.Popen[str]) -> None:
    started.kill()
    started.wait(30)


def test_a_worker_killed_in_the_middle_of_its_copy(stack: ExitStack) -> None:
    node = stack.enter_context(closing(samples.server()))
    worker = process(stack, "worker", node.local_name, "", "0", str(NUMEL))
    assert hear(worker) == "taken"
    tell(worker, "half")
    assert hear(worker) == "half"
    kill(worker)
    assert node.held() == (held(SHARD, 1),)
    assert node.record(held(SHARD, 1)) == samples.full_record(SHARD, 1)
    # A new worker of a new generation continues with the same server.
    after = template(0, 1, 2, NUMEL)
    with closing(SnapshotClient(node.local_name, TOKEN)) as memory:
        memory.open(after, after.bytes, [], base=(1, 1))
        take(memory, after, 2)
        assert node.held() == (held(after, 2),)


def test_a_worker_killed_while_its_snapshot_is_sent(stack: ExitStack) -> None:
    node, other = (stack.enter_context(closing(samples.server())) for _ in range(2))
    proxy = stack.enter_context(closing(Proxy(other.address, pass_bytes=SHARD.bytes * 3 // 2)))
    worker = process(stack, "worker", node.local_name, *map(str, proxy.address), str(NUMEL))
    assert hear(worker) == "taken"
    tell(worker, "commit")
    assert hear(worker) == "committed"
    assert proxy.reached.wait(30)
    kill(worker)
    # Complete on its own node, not yet on the other.
    assert set(node.held()) == {held(SHARD, 1), held(SHARD, 2)}
    assert other.held() == (held(SHARD, 1, replica=True),)
    proxy.go.set()
    wait_for_senders(node)
    assert other.record(held(SHARD, 2, replica=True)) == samples.full_record(SHARD, 2)


def wait_for_senders(node: SnapshotServer) -> None:
    """They continue without their worker and end with its last snapshot."""
    for replication in node._replications:
        assert replication.join(30)


def test_a_server_killed_while_it_sends(stack: ExitStack) -> None:
    other = stack.enter_context(closing(samples.server()))
    proxy = stack.enter_context(closing(Proxy(other.address, pass_bytes=SHARD.bytes * 3 // 2)))
    node = process(stack, "server")
    _, local_name = hear(node).split()
    memory = stack.enter_context(closing(SnapshotClient(local_name, TOKEN)))
    memory.open(SHARD, SHARD.bytes, [proxy.address])
    take(memory, SHARD, 1)
    snap(memory, SHARD, 2)
    assert proxy.reached.wait(30)
    kill(node)
    proxy.close()
    assert not memory.wait_complete(2, 30)
    assert "cannot be reached" in (memory.failed() or "")
    with pytest.raises(StorageError, match="gone"):
        memory.settled(2)
    # The training continues: its memory is still mapped, its own process unhurt.
    assert other.held() == (held(SHARD, 1, replica=True),)
    assert other.record(other.held()[0]) == samples.full_record(SHARD, 1)


def test_a_server_killed_while_it_receives(stack: ExitStack) -> None:
    node, third = (stack.enter_context(closing(samples.server())) for _ in range(2))
    other = process(stack, "server")
    port, _ = hear(other).split()
    proxy = stack.enter_context(closing(Proxy(("127.0.0.1", int(port)), pass_bytes=SHARD.bytes * 3 // 2)))
    memory = stack.enter_context(closing(SnapshotClient(node.local_name, TOKEN)))
    memory.open(SHARD, SHARD.bytes, [proxy.address])
    take(memory, SHARD, 1)
    snap(memory, SHARD, 2)
    assert proxy.reached.wait(30)
    kill(other)
    proxy.go.set()
    with memory._changed:
        assert memory._changed.wait_for(lambda: memory._progress and memory._progress.failed, 30)
    assert_names_the_holder(memory)
    assert memory.complete() == 1
    assert set(node.held()) == {held(SHARD, 1), held(SHARD, 2)}
    # The next generation has another holder.
    after = template(0, 1, 2, NUMEL)
    memory.open(after, after.bytes, [third.address], base=(1, 2))
    take(memory, after, 3)
    assert memory.failed() is None
    assert third.held() == (held(after, 3, replica=True),)


def assert_names_the_holder(memory: SnapshotClient) -> None:
    failed = memory.failed()
    assert failed is not None
    assert failed.startswith("127.0.0.1:")
    assert "accepts no replica of rank 0: " in failed


def test_an_answer_that_was_lost_is_not_a_snapshot_that_was_lost(stack: ExitStack) -> None:
    node, other = (stack.enter_context(closing(samples.server())) for _ in range(2))
    # Greeting 48, proof 32, and six for each "{}": all but the last one, which says that every byte has come.
    proxy = stack.enter_context(closing(Proxy(other.address, answer_bytes=48 + 32 + 6 + 6)))
    memory = stack.enter_context(closing(SnapshotClient(node.local_name, TOKEN)))
    memory.open(SHARD, SHARD.bytes, [proxy.address])
    take(memory, SHARD, 1)
    assert other.stats()["received_bytes"] == SHARD.bytes
    take(memory, SHARD, 2)
    assert set(other.held()) == {held(SHARD, 1, replica=True), held(SHARD, 2, replica=True)}
