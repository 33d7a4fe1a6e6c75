"""Processes that read a dataset stay while generations change, and read nothing of one that is over."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from elastic.training.data import reading_processes
from elastic.training.data.reading_processes import ReadingProcesses


class Told(Dataset[Any]):
    """Each sample is itself and the process that has read it. Those from `slow` on wait for `go`."""

    def __init__(self, slow: int = 1 << 30) -> None:
        self.slow = slow
        self.begun, self.go = multiprocessing.Semaphore(0), multiprocessing.Event()
        self.read = torch.zeros(64, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.read[index] += 1
        if index >= self.slow:
            self.begun.release()
            assert self.go.wait(60)
        return index, os.getpid()


def how(workers: int = 2) -> dict[str, Any]:
    return {"num_workers": workers, "prefetch_factor": 2, "collate_fn": list}


@pytest.fixture
def processes() -> Iterator[ReadingProcesses]:
    made = ReadingProcesses()
    yield made
    made.close()


def seen(batches: Iterator[Any]) -> tuple[list[list[int]], set[int]]:
    found = list(batches)
    return [[index for index, _ in batch] for batch in found], {process for batch in found for _, process in batch}


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_they_stay_for_the_next_generation(processes: ReadingProcesses) -> None:
    processes.stay()
    data = Told()
    first, readers = seen(processes.open(data, [[0, 1], [2, 3], [4]], how()))
    processes.release()
    second, same = seen(processes.open(data, [[4, 5], [6]], how()))
    assert (first, second) == ([[0, 1], [2, 3], [4]], [[4, 5], [6]])
    assert same == readers
    assert len(readers) == 2
    processes.close()
    assert not any(map(lives, readers))


def test_one_generation_alone_ends_with_its_processes(processes: ReadingProcesses) -> None:
    _, readers = seen(processes.open(Told(), [[0], [1]], how()))
    processes.release()
    assert not any(map(lives, readers))


def test_what_was_asked_for_before_is_not_read(processes: ReadingProcesses) -> None:
    """The next generation waits for the sample at hand, not for the batches behind it, and gets none of them."""
    processes.stay()
    data = Told(slow=1)
    batches = processes.open(data, [[0], [1, 2], [3]], how(workers=1))
    assert next(batches)[0][0] == 0
    assert data.begun.acquire(timeout=60)
    processes.release()
    data.go.set()
    second, _ = seen(processes.open(data, [[7], [8]], how(workers=1)))
    assert second == [[7], [8]]
    assert data.read.nonzero().flatten().tolist() == [0, 1, 7, 8]


def test_one_that_hangs_in_its_sample_is_replaced(
    processes: ReadingProcesses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The storage that a lost node has served, say: it must not hold up what comes after."""
    monkeypatch.setattr(reading_processes, "_PATIENCE_S", 0.1)
    processes.stay()
    data = Told(slow=1)
    batches = processes.open(data, [[0], [1]], how(workers=1))
    (_, hangs), *_ = next(batches)
    assert data.begun.acquire(timeout=60)
    processes.release()
    data.slow = 1 << 30
    found, readers = seen(processes.open(data, [[2], [3]], how(workers=1)))
    assert found == [[2], [3]]
    assert hangs not in readers
    assert not lives(hangs)
    assert "timed out" in caplog.text


def test_one_that_was_killed_is_replaced(processes: ReadingProcesses, caplog: pytest.LogCaptureFixture) -> None:
    processes.stay()
    _, readers = seen(processes.open(Told(), [[0], [1]], how()))
    processes.release()
    assert processes._loader is not None
    workers: Any = processes._loader._iterator
    victim = workers._workers[0]
    os.kill(victim.pid, signal.SIGKILL)
    # torch's handler raises in the main thread, wherever it is, unless `join` has seen the end before.
    with contextlib.suppress(RuntimeError):
        victim.join(60)
    found, others = seen(processes.open(Told(), [[2], [3]], how()))
    assert found == [[2], [3]]
    assert not readers & others
    assert "started again" in caplog.text
