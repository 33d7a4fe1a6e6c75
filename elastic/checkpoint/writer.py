"""Writes snapshots to storage concurrently with training: one thread, one snapshot in progress, at most one waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from elastic.checkpoint.snapshot import ShardSnapshot
from elastic.core.checkpoint.manifest import ShardRecord
from elastic.core.errors import ElasticError, Fenced, IntegrityError, StorageError

logger = logging.getLogger(__name__)

OnWritten = Callable[[ShardRecord], None]
OnFailed = Callable[[int, ElasticError, "float | None"], None]
OnSuperseded = Callable[[int, int], None]
# Waits until the predicate holds or the time is over; called with the condition held.
Wait = Callable[[threading.Condition, Callable[[], bool], float], object]


class ShardWriter(Protocol):
    """The part of `CheckpointStore` that the writer uses."""

    def write_shard(self, snapshot: ShardSnapshot) -> ShardRecord: ...


def retry_delay_s(failures: int, first_s: float, limit_s: float) -> float:
    """Seconds to wait after this many failures in a row: first_s, 2 * first_s, 4 * first_s, ... up to limit_s."""
    # The exponent is bounded: storage that fails for days must not overflow a float.
    return min(limit_s, first_s * 2.0 ** min(failures - 1, 64))


class BackgroundWriter:
    """Callbacks are called on the writer's own thread and may block it; what they raise is treated as a failed write.

    `on_written(record)`: the shard is durable. May be called again for the same shard if it raised.
    `on_failed(step, error, next_retry_s)`: a write failed and is repeated after this many seconds, or never (None): the
    snapshot is given up because it is invalid or fenced, or because the writer was closed.
    `on_superseded(step, by_step)`: a newer snapshot took its place before it was written.
    """

    def __init__(
        self,
        store: ShardWriter,
        on_written: OnWritten,
        on_failed: OnFailed,
        *,
        on_superseded: OnSuperseded | None = None,
        backoff_s: float = 1.0,
        backoff_limit_s: float = 60.0,
        wait: Wait | None = None,
    ) -> None:
        self._store = store
        self._on_written = on_written
        self._on_failed = on_failed
        self._on_superseded = on_superseded
        self._backoff_s = (backoff_s, backoff_limit_s)
        self._wait = wait or (lambda changed, predicate, seconds: changed.wait_for(predicate, seconds))
        self._changed = threading.Condition()
        self._waiting: ShardSnapshot | None = None
        self._replaced: list[tuple[int, int]] = []
        self._working = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def submit(self, snapshot: ShardSnapshot) -> bool:
        """Hand over a snapshot and return at once; False if the writer is closed. A waiting older one is replaced."""
        with self._changed:
            if self._closing:
                return False
            if self._waiting is not None:
                self._replaced.append((self._waiting.step, snapshot.step))
            self._waiting = snapshot
            self._changed.notify_all()
        return True

    @property
    def free(self) -> bool:
        """True when no snapshot waits: the next one that is submitted replaces none."""
        with self._changed:
            return self._waiting is None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every submitted snapshot is written, superseded or given up; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop after the current write; a waiting snapshot is given up and reported. False if the thread is busy."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _is_idle(self) -> bool:
        return self._waiting is None and not self._working and not self._replaced

    def _run(self) -> None:
        while (snapshot := self._next()) is not None:
            self._write(snapshot)
            with self._changed:
                self._working = False
                self._changed.notify_all()
        with self._changed:
            self._working = False
            self._changed.notify_all()

    def _next(self) -> ShardSnapshot | None:
        """The snapshot to write now; None once the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            snapshot, self._waiting = self._waiting, None
            self._working = True
            closing = self._closing
        self._report_replaced()
        if snapshot is not None and closing:
            self._report(snapshot.step, StorageError("the writer was closed before this snapshot was written"), None)
        return None if closing else snapshot

    def _write(self, snapshot: ShardSnapshot) -> None:
        failures = 0
        while True:
            try:
                self._on_written(self._store.write_shard(snapshot))
                return
            except (Fenced, IntegrityError) as error:
                self._report(snapshot.step, error, None)  # a retry cannot make it valid
                return
            except Exception as error:  # noqa: BLE001 - the edge of the thread: every error is reported
                failures += 1
                if not self._retry_later(snapshot, _as_elastic(error), failures):
                    return

    def _retry_later(self, snapshot: ShardSnapshot, error: ElasticError, failures: int) -> bool:
        """Report the failure and wait; False when the snapshot is given up."""
        delay_s = retry_delay_s(failures, *self._backoff_s)
        with self._changed:
            overtaken = self._waiting is not None or self._closing
        self._report(snapshot.step, error, None if overtaken else delay_s)
        with self._changed:
            if not overtaken:
                self._wait(self._changed, lambda: self._waiting is not None or self._closing, delay_s)
            if self._waiting is not None:
                self._replaced.append((snapshot.step, self._waiting.step))
                return False
            closing = self._closing
        if closing and not overtaken:
            self._report(snapshot.step, error, None)
        return not closing

    def _report_replaced(self) -> None:
        with self._changed:
            replaced, self._replaced = self._replaced, []
        for step, by_step in replaced:
            logger.warning("the snapshot of step %d was not written: that of step %d took its place", step, by_step)
            if self._on_superseded is not None:
                _guarded(self._on_superseded, step, by_step)

    def _report(self, step: int, error: ElasticError, next_retry_s: float | None) -> None:
        next_try = "given up" if next_retry_s is None else f"tried again in {next_retry_s:g} s"
        logger.warning("writing the snapshot of step %d failed, %s: %s", step, next_try, error)
        _guarded(self._on_failed, step, error, next_retry_s)


def _guarded(callback: Callable[..., None], *arguments: object) -> None:
    try:
        callback(*arguments)
    except Exception:
        # The error can only be logged, and the next snapshot must still be written.
        logger.exception("a checkpoint writer's callback failed")


def _as_elastic(error: Exception) -> ElasticError:
    return error if isinstance(error, ElasticError) else StorageError(f"{type(error).__name__}: {error}")
