from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import one_snapshot
from storage_faults import Fault, FaultyObjects

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.checkpoint.storage import CheckpointStore
from elastic.checkpoint.writer import BackgroundWriter, retry_delay_s
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import ElasticError, Fenced, IntegrityError, StorageError
from elastic.store.local import LocalObjects

# How long a test waits for what must happen; it never passes by waiting.
PATIENCE_S = 60.0


def snap(step: int) -> ShardSnapshot:
    return one_snapshot(step=step)


def record(step: int) -> ShardRecord:
    return ShardRecord(0, 1, 3, step, "f", 0, "", (), (), {})


class Script:
    """A store whose writes go as they are told: each entry is an error to raise, or None. Then all succeed."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.attempts: list[int] = []
        self.started = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.gated = False

    def write_shard(self, snapshot: ShardSnapshot) -> ShardRecord:
        self.attempts.append(snapshot.step)
        self.started.release()
        if self.gated:
            assert self.go_on.acquire(timeout=PATIENCE_S)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        return record(snapshot.step)


class Heard:
    """What the writer reported, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.errors: list[ElasticError] = []
        self.failed = threading.Semaphore(0)

    def written(self, found: ShardRecord) -> None:
        self.events.append(("written", found.step))

    def on_failed(self, step: int, error: ElasticError, next_retry_s: float | None) -> None:
        self.events.append(("failed", step, next_retry_s))
        self.errors.append(error)
        self.failed.release()

    def superseded(self, step: int, by_step: int) -> None:
        self.events.append(("superseded", step, by_step))


def no_wait(changed: threading.Condition, predicate: Callable[[], bool], seconds: float) -> bool:
    return predicate()


def start(store: Script | CheckpointStore, heard: Heard, **options: object) -> BackgroundWriter:
    options = {"wait": no_wait, "on_superseded": heard.superseded, **options}
    return BackgroundWriter(store, heard.written, heard.on_failed, **options)  # type: ignore[arg-type]


def test_writes_in_the_background() -> None:
    store, heard = Script(), Heard()
    writer = start(store, heard)
    assert writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    assert writer.submit(snap(20))
    assert writer.flush(PATIENCE_S)
    assert heard.events == [("written", 10), ("written", 20)]
    assert writer.close(PATIENCE_S)


def test_submit_does_not_wait_for_a_write_in_work() -> None:
    store, heard = Script(), Heard()
    store.gated = True
    writer = start(store, heard)
    writer.submit(snap(10))
    assert store.started.acquire(timeout=PATIENCE_S)
    # The store is stuck now. All of these return.
    assert all(writer.submit(snap(step)) for step in (20, 30, 40))
    assert not writer.flush(0)
    store.gated = False
    store.go_on.release()
    assert writer.flush(PATIENCE_S)
    assert heard.events == [("written", 10), ("superseded", 20, 30), ("superseded", 30, 40), ("written", 40)]
    writer.close(PATIENCE_S)


def test_a_failing_write_is_repeated_with_growing_pauses() -> None:
    store, heard = Script(*[StorageError("away")] * 5), Heard()
    writer = start(store, heard, backoff_s=2.0, backoff_limit_s=10.0)
    writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    pauses = [event[2] for event in heard.events if event[0] == "failed"]
    assert pauses == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert heard.events[-1] == ("written", 10)
    assert store.attempts == [10] * 6
    writer.close(PATIENCE_S)


def test_pauses_begin_anew_after_a_success() -> None:
    store, heard = Script(StorageError("1"), StorageError("2"), None, StorageError("3")), Heard()
    writer = start(store, heard, backoff_s=1.0)
    for step in (10, 20):
        writer.submit(snap(step))
        assert writer.flush(PATIENCE_S)
    assert [event[2] for event in heard.events if event[0] == "failed"] == [1.0, 2.0, 1.0]
    writer.close(PATIENCE_S)


def test_a_newer_snapshot_ends_the_pause() -> None:
    store, heard = Script(StorageError("away")), Heard()
    # The real wait, of an hour: only the newer snapshot can end it.
    writer = BackgroundWriter(
        store, heard.written, heard.on_failed, on_superseded=heard.superseded, backoff_s=3600.0, backoff_limit_s=3600.0
    )
    writer.submit(snap(10))
    assert heard.failed.acquire(timeout=PATIENCE_S)
    writer.submit(snap(20))
    assert writer.flush(PATIENCE_S)
    assert heard.events == [("failed", 10, 3600.0), ("superseded", 10, 20), ("written", 20)]
    assert writer.close(PATIENCE_S)


def test_close_ends_the_pause_and_says_what_is_lost() -> None:
    store, heard = Script(StorageError("away")), Heard()
    writer = BackgroundWriter(store, heard.written, heard.on_failed, backoff_s=3600.0, backoff_limit_s=3600.0)
    writer.submit(snap(10))
    assert heard.failed.acquire(timeout=PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert heard.events == [("failed", 10, 3600.0), ("failed", 10, None)]
    assert not writer.submit(snap(20))
    assert writer.close(PATIENCE_S)


def test_close_finishes_the_write_in_work_and_reports_the_waiting_one() -> None:
    store, heard = Script(), Heard()
    store.gated = True
    writer = start(store, heard)
    writer.submit(snap(10))
    assert store.started.acquire(timeout=PATIENCE_S)
    writer.submit(snap(20))
    assert not writer.close(0)
    store.go_on.release()
    assert writer.close(PATIENCE_S)
    assert heard.events == [("written", 10), ("failed", 20, None)]
    assert "closed before" in heard.errors[0].message
    assert writer.flush(0)


@pytest.mark.parametrize("error", [Fenced("committed"), IntegrityError("malformed")])
def test_what_cannot_become_right_is_not_repeated(error: ElasticError) -> None:
    store, heard = Script(error), Heard()
    writer = start(store, heard)
    writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    writer.submit(snap(20))
    assert writer.flush(PATIENCE_S)
    assert heard.events == [("failed", 10, None), ("written", 20)]
    assert heard.errors == [error]
    writer.close(PATIENCE_S)


def test_errors_of_any_kind_are_reported_as_ours() -> None:
    store, heard = Script(RuntimeError("a bug"), MemoryError()), Heard()
    writer = start(store, heard)
    writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    assert [error.message for error in heard.errors] == ["RuntimeError: a bug", "MemoryError: "]
    assert heard.events[-1] == ("written", 10)
    writer.close(PATIENCE_S)


def test_a_report_that_fails_is_made_again() -> None:
    store, heard = Script(), Heard()
    lost = [ConnectionError("the controller is away")]

    def written(found: ShardRecord) -> None:
        if lost:
            raise lost.pop()
        heard.written(found)

    writer = BackgroundWriter(store, written, heard.on_failed, wait=no_wait)
    writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    assert heard.events == [("failed", 10, 1.0), ("written", 10)]
    writer.close(PATIENCE_S)


def test_a_failing_error_report_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    store, heard = Script(StorageError("away")), Heard()

    def failed(step: int, error: ElasticError, next_retry_s: float | None) -> None:
        raise ValueError("nobody listens")

    writer = BackgroundWriter(store, heard.written, failed, wait=no_wait)
    writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    assert heard.events == [("written", 10)]
    assert "callback failed" in caplog.text
    assert "away" in caplog.text
    writer.close(PATIENCE_S)


def test_close_may_be_called_by_a_callback() -> None:
    store, heard = Script(), Heard()
    writers: list[BackgroundWriter] = []

    def written(found: ShardRecord) -> None:
        heard.written(found)
        writers[0].close(PATIENCE_S)

    writers.append(BackgroundWriter(store, written, heard.on_failed))
    writers[0].submit(snap(10))
    assert writers[0].close(PATIENCE_S)
    assert heard.events in ([("written", 10)], [("failed", 10, None)])


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    failing = 3
    objects = FaultyObjects(
        LocalObjects(str(tmp_path)),
        lambda operation, n, path: Fault.DISK_FULL if operation == "put" and n <= failing else None,
    )
    heard = Heard()
    writer = start(CheckpointStore("u", "run", objects=objects), heard)
    writer.submit(snap(10))
    assert writer.flush(PATIENCE_S)
    assert [event[0] for event in heard.events] == ["failed"] * 3 + ["written"]
    assert all("disk full" in error.message for error in heard.errors)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".safetensors"]
    writer.close(PATIENCE_S)


def test_pauses_do_not_overflow() -> None:
    assert [retry_delay_s(n, 1.0, 60.0) for n in (1, 2, 3, 7, 10**6)] == [1.0, 2.0, 4.0, 60.0, 60.0]
