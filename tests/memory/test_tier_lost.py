"""A node that keeps replicas lives but does not take them: the rank that waits reports it. Real servers, no engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import memory_samples as samples
import pytest
import torch
from memory_proxy import Proxy
from memory_samples import TOKEN, take, template

from elastic.checkpoint.memory.server import sender
from elastic.checkpoint.memory.server.node_shards import NodeShards
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.core.errors import StorageError
from elastic.core.generation_spec import GenerationSpec, MemoryPlan
from elastic.training.local import SilentCoordinator
from elastic.training.saving import memory_tier
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.state.host import Transfer

LIMIT_S = 30.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Trickle(Proxy):
    """Passes on what goes upstream byte by byte: something moves all the time, and nothing ever arrives."""

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None, hold: bool) -> None:
        passed = 0
        with suppress(OSError):
            # The handshake and the opening of the shard go through.
            while data := source.recv(1 << 16 if not hold or passed < 4096 else 1):
                if passed >= 4096 and hold and self.go.wait(0.02):
                    break
                target.sendall(data)
                passed += len(data)


class Rank(SilentCoordinator):
    """A rank of a state of `nbytes`, and its snapshots."""

    def __init__(self, memory: SnapshotClient, holder: Any, nbytes: int, spares: tuple[Any, ...] = ()) -> None:
        self.lost: list[str] = []
        self.moved: list[str] = []
        self._memory = memory
        plan = MemoryPlan(targets=(holder,), every_steps=None, spares=spares)
        self.scope = GenerationScope(GenerationSpec("run", 1, 0, 1, memory=plan), self, torch.device("cpu"))
        record = template(0, 1, numel=nbytes // 8)
        agreement: Any = SimpleNamespace(least=lambda values: [int(value) for value in values])
        state: Any = SimpleNamespace(
            agreement=agreement,
            replicas=lambda turn: None,
            marks=lambda replicas: [],
            require_equal=lambda least, replicas: None,
            record=lambda generation, shard: (record, record.bytes),
            sharded=SimpleNamespace(writers=None),
            capture_into=lambda memory, record, step, caller: (caller, Transfer([], [])),
        )
        self.snapshots = Snapshots(self.scope, state, dict)

    def memory(self) -> SnapshotClient:
        return self._memory

    def memory_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def replica_moved(self, sentence: str) -> None:
        self.moved.append(sentence)

    def step(self) -> None:
        self.scope.step += 1
        self.snapshots.prepare(0.1, True)
        self.snapshots.start()
        self.snapshots.drain()


def test_a_holder_that_takes_a_replica_byte_by_byte_is_named(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    # Shorter than the sender's own tries, which such a holder never lets fail.
    monkeypatch.setattr(memory_tier, "_COMPLETE_LIMIT_S", 0.5)
    node, other = samples.server(), samples.server()
    stack.callback(node.close)
    stack.callback(other.close)
    slow = stack.enter_context(closing(Trickle(other.address)))
    memory = stack.enter_context(closing(SnapshotClient(node.local_name, TOKEN)))
    rank = Rank(memory, slow.address, 8 << 20)
    stack.callback(rank.snapshots.close)
    deadline = time.monotonic() + LIMIT_S
    while not rank.lost and time.monotonic() < deadline:
        rank.step()
        memory.wait_complete(rank.scope.step, 0.05)
    assert len(rank.lost) == 1, "the tier is gone, and the rank has not said so"
    assert f"127.0.0.1:{slow.address[1]}" in rank.lost[0]
    assert "the snapshot of step 1 is not complete" in rank.lost[0]


@pytest.mark.parametrize("fault", ["refuses", "trickles"])
def test_another_node_takes_the_place_of_one_that_takes_no_replicas_within_the_generation(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(sender, "GIVE_UP_S", 0.5)
    nodes = [samples.server() for _ in range(4)]
    for server in nodes:
        stack.callback(server.close)
    node, other, dead, spare = nodes
    proxy = stack.enter_context(closing(Trickle(other.address) if fault == "trickles" else Proxy(other.address)))
    if fault == "refuses":
        # Every connection is refused at once.
        other.close()
    # The first that might take its place is not there either.
    dead.close()
    memory = stack.enter_context(closing(SnapshotClient(node.local_name, TOKEN)))
    rank = Rank(memory, proxy.address, 8 << 20, (dead.address, spare.address))
    stack.callback(rank.snapshots.close)
    deadline = time.monotonic() + LIMIT_S
    complete = False
    # Not after every step is a snapshot due: the cadence follows its measured cost.
    while not complete and time.monotonic() < deadline:
        rank.step()
        complete = memory.wait_complete(rank.scope.step, 0.05)
    assert complete, memory.failed()
    assert rank.scope.step in [held.step for held in spare.held() if held.replica]
    assert rank.lost == []
    host, port = spare.address
    assert rank.moved[-1].endswith(f"{host}:{port} keeps it instead")
    assert f"127.0.0.1:{proxy.address[1]} accepts no replica of rank 0" in rank.moved[0]


@pytest.mark.parametrize("alone", [False, True])
def test_a_thread_that_ends_by_an_unforeseen_error_is_a_loss(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    node, other = samples.server(), samples.server()
    stack.callback(node.close)
    stack.callback(other.close)
    memory = stack.enter_context(closing(SnapshotClient(node.local_name, TOKEN)))
    record = template(0, 1)
    memory.open(record, record.bytes, [] if alone else [other.address])
    take(memory, record, 1)

    def fails(*_: Any, **__: Any) -> str:
        raise MemoryError("cannot map")

    monkeypatch.setattr(NodeShards, "hash_own", fails)
    monkeypatch.setattr(sender, "send_replica", fails)
    samples.snap(memory, record, 2)
    assert not memory.wait_complete(2, LIMIT_S)
    with pytest.raises(StorageError, match=r"rank 0.*cannot map"):
        memory.complete()
