"""One rank's snapshots in its node's memory: when they are given up, and what is not believed. No engine, no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.comm.lanes import Lanes
from elastic.core.errors import GenerationEnded, StorageError, UsageError
from elastic.core.generation_spec import GenerationSpec, MemoryPlan
from elastic.training.local import SilentCoordinator
from elastic.training.saving import memory_tier
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.session import SnapshotMemory
from elastic.training.state.host import Transfer


class Node:
    """Memory of `nbytes`. What is committed is complete at once, unless `gone` says why nothing can be reached."""

    node = "here"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.gone: str | None = None
        self.committed: list[int] = []
        self.settled_steps: list[int] = []
        self.abandoned = False

    def open(
        self, template: Any, nbytes: int, targets: Any, base: Any = None, stripe: Sequence[int] = (),
        spares: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        assert nbytes == self.nbytes

    def segment(self) -> memoryview:
        self._reach()
        return memoryview(bytearray(self.nbytes))

    def commit(self, step: int, extra_state: Mapping[str, Any] | None) -> None:
        self._reach()
        self.committed.append(step)

    def complete(self) -> int:
        self._reach()
        return self.committed[-1] if self.committed else -1

    def wait_complete(self, step: int, timeout_s: float) -> bool:
        return step in self.committed

    def moved(self) -> str | None:
        return None

    def failed(self) -> str | None:
        return self.gone

    def settled(self, step: int) -> None:
        self.settled_steps.append(step)

    def abandon(self) -> None:
        self.abandoned = True

    def _reach(self) -> None:
        if self.gone is not None:
            raise StorageError(self.gone)


class Alone:
    """The other rank fares as this one does."""

    def least(self, values: Sequence[int | bool]) -> list[int]:
        return [int(value) for value in values]


class State:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.agreement: Any = Alone()
        self.lanes = Lanes(self.agreement, self.agreement)
        self.sharded = SimpleNamespace(writers=None)
        self.targets: list[torch.Tensor] = []

    def replicas(self, turn: int) -> None:
        return None

    def marks(self, replicas: None) -> list[int]:
        return [0, 0]

    def require_equal(self, least: Sequence[int], replicas: None) -> None:
        """Nothing is replicated."""

    def record(self, generation: int, shard: tuple[int, int] | None = None) -> tuple[Any, int]:
        return SimpleNamespace(), self.nbytes

    def capture_into(self, memory: torch.Tensor, record: Any, step: int, caller: Any) -> tuple[Any, Transfer]:
        self.targets.append(memory)
        return caller, Transfer([(memory, torch.ones(self.nbytes, dtype=torch.uint8))], [])


class Rank(SilentCoordinator):
    def __init__(self, nbytes: int = 8, required: bool = False) -> None:
        self.node, self.lost = Node(nbytes), list[str]()
        spec = GenerationSpec("run", 1, 0, 2, memory=MemoryPlan(every_steps=1, required=required))
        self.scope = GenerationScope(spec, self, torch.device("cpu"))
        self.state: Any = State(nbytes)
        self.snapshots = Snapshots(self.scope, self.state, dict)

    def memory(self) -> SnapshotMemory:
        return self.node

    def memory_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def step(self, applied: bool = True) -> None:
        self.scope.step += 1
        self.snapshots.prepare(0.1, applied)
        self.snapshots.start()
        self.snapshots.drain()


@pytest.mark.parametrize("nbytes", [0, 8])
def test_every_rank_takes_part_also_one_that_was_dealt_nothing(nbytes: int) -> None:
    rank = Rank(nbytes)
    for _ in range(3):
        rank.step()
    assert rank.node.committed == [1, 2, 3]
    assert rank.node.settled_steps == [1, 2]
    assert rank.lost == []


def test_a_save_that_the_script_asks_for_is_told_with_a_snapshot() -> None:
    """Until it is known that the script asks at all: then each step has an exchange for it."""
    rank, exchanges = Rank(), list[bool]()
    rank.state.agreement.any = lambda flag: exchanges.append(flag) or flag
    rank.step()
    assert not rank.snapshots.asked_for(False)
    rank.snapshots.asks = True
    assert not rank.snapshots.asked_for(False), "no snapshot was taken since"
    rank.step()
    assert rank.snapshots.asked_for(False)
    assert exchanges == []
    rank.snapshots.asks = False
    rank.step()
    assert not rank.snapshots.asked_for(False)
    assert [rank.snapshots.asked_for(True), exchanges] == [False, [False]]


@pytest.mark.parametrize(("copied", "done"), [(True, True), (True, False), (False, True)])
def test_memory_that_is_still_written_at_the_end_is_not_used_again(
    copied: bool, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank()
    rank.step()
    copier: Any = rank.snapshots._copier
    close = copier.close
    monkeypatch.setattr(copier, "close", lambda: close() and copied)
    monkeypatch.setattr(memory_tier, "done", lambda device: done)
    rank.snapshots.close()
    assert rank.node.abandoned is not (copied and done)


def test_a_memory_that_goes_away_between_two_snapshots_is_told() -> None:
    rank = Rank()
    rank.step()
    rank.node.gone = "the server does not answer"
    for _ in range(3):
        rank.step()
    assert rank.lost == ["the server does not answer"]


@pytest.mark.parametrize("required", [False, True])
def test_a_replica_holder_without_memory_is_told_or_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    rank = Rank(required=required)
    rank.step()

    def complete() -> int:
        raise UsageError("10.0.0.2:5 accepts no replica of rank 0: 3 GiB are needed")

    monkeypatch.setattr(rank.node, "complete", complete)
    if required:
        with pytest.raises(UsageError, match="accepts no replica of rank 0"):
            rank.step()
        return
    for _ in range(2):
        rank.step()
    assert rank.lost == ["10.0.0.2:5 accepts no replica of rank 0: 3 GiB are needed"]
    assert rank.node.committed == [1], "no more snapshots are taken"


def test_a_snapshot_that_could_not_be_handed_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.step()

    def commit(step: int, extra_state: Any) -> None:
        raise StorageError("the connection broke")

    monkeypatch.setattr(rank.node, "commit", commit)
    for _ in range(3):
        rank.step()
    assert rank.lost == ["the connection broke"]


def test_what_a_group_said_while_it_was_aborted_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL lets an exchange that is aborted return, with this rank's own figures for everybody's."""
    rank = Rank()
    rank.step()

    def aborted(own: Sequence[int]) -> list[int]:
        rank.scope.end("a peer is lost")
        return [int(value) for value in own]

    monkeypatch.setattr(rank.state.agreement, "least", aborted)
    with pytest.raises(GenerationEnded):
        rank.step()
    assert rank.node.settled_steps == [], "the snapshot may be complete on this node only"
    assert rank.node.committed == [1]


def test_no_snapshot_is_taken_before_an_optimizer_step_was_applied() -> None:
    rank = Rank()
    for applied in (False, False, True, False):
        rank.step(applied)
    assert rank.node.committed == [3, 4]
