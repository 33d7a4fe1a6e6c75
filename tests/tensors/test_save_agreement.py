"""Storage that is slower than the cadence: all ranks leave out the same saves, so that those they make become whole."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.writer import BackgroundWriter
from elastic.core.generation_spec import GenerationSpec
from elastic.training.local import SilentCoordinator
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.state.host import Transfer

RANKS, STEPS = 8, 40
LIMIT_S = 30.0


class Rank(SilentCoordinator):
    """A rank with the real writer, whose storage finishes a write when it is told to."""

    def __init__(self, ready: list[bool]) -> None:
        self.given: list[int] = []
        self.written: list[int] = []
        self.left_out: list[int] = []
        self._tokens, self._began, self._done = (threading.Semaphore(0) for _ in range(3))
        self._in_work = self._waiting = False
        self.writer = BackgroundWriter(self, lambda record: None, lambda *_: None)  # type: ignore[arg-type]
        spec = GenerationSpec("run", 1, 0, RANKS, checkpoint_every_steps=1)
        self.scope = GenerationScope(spec, self, torch.device("cpu"))
        # The least over all ranks, which were asked before any of them continued.
        agreement = SimpleNamespace(least=lambda values: [int(all(ready))])
        state: Any = SimpleNamespace(agreement=agreement, verify_replicas=lambda: None, capture=self._capture)
        self.snapshots = Snapshots(self.scope, state, dict)

    def can_save(self) -> bool:
        return self.writer.free

    def save(self, snapshot: ShardSnapshot) -> None:
        self.given.append(snapshot.step)
        self.writer.submit(snapshot)
        if self._in_work:
            self._waiting = True
        else:
            self._in_work = True
            assert self._began.acquire(timeout=LIMIT_S)

    def save_left_out(self, step: int) -> None:
        self.left_out.append(step)

    def step(self) -> None:
        self.scope.step += 1
        self.snapshots.prepare(0.1, True)
        self.snapshots.start()
        self.snapshots.drain()

    def finish_a_write(self) -> None:
        """Returns when the writer is at the next one, or has nothing to do."""
        if not self._in_work:
            return
        self._tokens.release()
        assert self._done.acquire(timeout=LIMIT_S)
        if self._waiting:
            self._waiting = False
            assert self._began.acquire(timeout=LIMIT_S)
        else:
            self._in_work = False
            assert self.writer.flush(LIMIT_S)

    def write_shard(self, snapshot: ShardSnapshot) -> Any:
        self._began.release()
        assert self._tokens.acquire(timeout=LIMIT_S)
        self.written.append(snapshot.step)
        self._done.release()
        return SimpleNamespace()

    def close(self) -> None:
        self.snapshots.close()
        for _ in range(2):
            self._tokens.release()
        assert self.writer.close(LIMIT_S)

    def _capture(self, *, step: int, **_: Any) -> tuple[Any, Transfer]:
        return SimpleNamespace(step=step), Transfer([], [])


def test_slow_storage_leaves_whole_checkpoints() -> None:
    ready = [True] * RANKS
    ranks = [Rank(ready) for _ in range(RANKS)]
    try:
        for step in range(STEPS):
            ready[:] = [rank.can_save() for rank in ranks]
            for rank in ranks:
                rank.step()
            for number, rank in enumerate(ranks):
                # Two writes in three steps, at another time on each rank.
                if (step + number) % 3 != 0:
                    rank.finish_a_write()
    finally:
        for rank in ranks:
            rank.close()
    whole = [step for step, count in Counter(s for rank in ranks for s in rank.written).items() if count == RANKS]
    unfinished = {step for rank in ranks for step in rank.given} - set(whole)
    assert len(whole) >= STEPS // 2, f"only {sorted(whole)} became whole"
    assert len(unfinished) <= 2, f"{sorted(unfinished)} were begun and left"
    assert_told(ranks)


def assert_told(ranks: Sequence[Rank]) -> None:
    assert ranks[0].left_out, "the test is to have saves that are left out"
    for rank in ranks:
        assert rank.given == ranks[0].given
        assert sorted([*rank.given, *rank.left_out]) == list(range(1, STEPS + 1))
