"""Progress that is reported while no step ends: by calls, and by `elastic.busy`."""

from __future__ import annotations

import threading

import pytest
import torch

from elastic.core.generation_spec import GenerationSpec
from elastic.training import scope as scopes
from elastic.training.busy import declared, reporting
from elastic.training.local import SilentCoordinator
from elastic.training.scope import GenerationScope


class Counting(SilentCoordinator):
    def __init__(self) -> None:
        self.moves = 0
        self.changed = threading.Condition()

    def moved(self, over: bool = False) -> None:
        with self.changed:
            self.moves += 1
            self.changed.notify_all()

    def wait_for(self, moves: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.moves >= moves, 30.0)


@pytest.fixture
def coordinator() -> Counting:
    return Counting()


@pytest.fixture
def scope(coordinator: Counting) -> GenerationScope:
    return GenerationScope(GenerationSpec("run", 1, 0, 1), coordinator, torch.device("cpu"))


def test_calls_are_reported_once_a_while(
    scope: GenerationScope, coordinator: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(scopes.time, "monotonic", lambda: now[0])
    for _ in range(30):
        scope.moved()
        now[0] += 0.25
    assert coordinator.moves == 8


def test_busy_code_is_reported_until_it_ends(
    scope: GenerationScope, coordinator: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.training.busy.MOVED_EVERY_S", 0.001)
    with reporting(scope, "exporting", 60.0):
        assert coordinator.wait_for(3)
    moves = coordinator.moves
    assert not [thread for thread in threading.enumerate() if thread.name == "elastic-busy"]
    assert coordinator.moves == moves


def test_busy_code_that_hangs_is_a_hang_in_the_end(
    scope: GenerationScope, coordinator: Counting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic.training.busy.MOVED_EVERY_S", 0.001)
    with reporting(scope, "exporting", 0.02):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "elastic-busy"]
        thread.join(30.0)
        assert not thread.is_alive()
    assert "still exporting after 0 s" in caplog.text


def test_busy_code_before_there_is_a_generation_is_declared() -> None:
    assert not declared()
    with reporting(None, "downloading", 60.0):
        assert declared()
        with reporting(None, "unpacking", -1.0):
            pass
        assert declared()
    assert not declared()
    with reporting(None, "downloading", -1.0):
        assert not declared(), "for longer than it may last it is a hang"


def test_a_generation_that_ended_is_not_reported(scope: GenerationScope, coordinator: Counting) -> None:
    scope.end("a node was lost")
    with reporting(scope, "exporting", 60.0):
        pass
    assert coordinator.moves == 0
