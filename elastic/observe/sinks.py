"""Sinks: exporters and trackers that get a run's records besides its journal.

A sink gets every record that the controller writes, on a thread of its own, through a bounded queue. The run never
waits for a sink: a full queue drops records, and a sink that raises is closed. Each is logged once, as a warning.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elastic.core.secrets import redact_values
from elastic.observe.records import Record

logger = logging.getLogger(__name__)

# Records that may wait for a sink. A record of steps holds up to 100 steps; the others are rare.
_WAITING = 1000


@dataclass(frozen=True)
class RunInfo:
    """The run of a sink. `incarnation` numbers the run's controllers: a restarted controller
    opens the same sinks again."""

    run_id: str
    attempt: int
    incarnation: int


class Sink(Protocol):
    """Call order: 1. `open` once; 2. `write` for each record, in the journal's order; 3. `close` once.

    All three are called on the sink's own thread, by `SinkFeed` only. They may block and may raise anything; after an
    exception only `close` is called. Records have a `time` (wall clock seconds) and a `type`; see
    `elastic.observe.records`. A record may be dropped, and may arrive more than once.
    """

    def open(self, run: RunInfo) -> None: ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class SinkFeed:
    """Feeds one sink. `put` and `close` are called by the controller and return at once, or after `close`'s limit."""

    def __init__(
        self, name: str, sink: Sink, run: RunInfo, waiting: int = _WAITING, secrets: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.dropped = 0
        self.failure: str | None = None
        self._sink = sink
        self._secrets = secrets
        # None ends the feed.
        self._queue: queue.Queue[Record | None] = queue.Queue(waiting)
        # A sink that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(run,), name=f"elastic-sink-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Never blocks and never raises. A record that finds the queue full is dropped and counted."""
        if self.failure is not None:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                logger.warning(
                    "sink %s does not keep up: records are dropped, and the run continues; check its target",
                    self.name,
                )

    def close(self, limit_s: float) -> bool:
        """Let the sink write the queued records, then close it. False if that takes longer than `limit_s`."""
        try:
            self._queue.put(None, timeout=limit_s)
        except queue.Full:
            return False
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self, run: RunInfo) -> None:
        if self._try(lambda: self._sink.open(run)):
            while (record := self._queue.get()) is not None:
                if not self._try(partial(self._write, record)):
                    break
        self._try(self._sink.close)

    def _write(self, record: Record) -> None:
        self._sink.write(redact_values(record, self._secrets))

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a sink may raise anything, and the run continues
            if self.failure is None:
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("sink %s is closed, and the run continues: %s", self.name, self.failure)
            return False
        return True


class Sinks:
    """All sinks of one controller: `put` gives each record to every sink."""

    def __init__(self, sinks: Mapping[str, Sink], secrets: Sequence[str] = ()) -> None:
        """`sinks` by name; `secrets` are texts that no sink may get."""
        self._sinks = dict(sinks)
        self._secrets = tuple(secrets)
        self.feeds: tuple[SinkFeed, ...] = ()

    def open(self, run: RunInfo) -> None:
        self.feeds = tuple(SinkFeed(name, sink, run, secrets=self._secrets) for name, sink in self._sinks.items())

    def put(self, record: Record) -> None:
        if self.feeds:
            stamped = {"time": round(time.time(), 4), **record}
            for feed in self.feeds:
                feed.put(stamped)

    def close(self, limit_s: float) -> None:
        """Blocks for at most `limit_s` in all; logs how many records a sink has missed."""
        deadline = time.monotonic() + limit_s
        for feed in self.feeds:
            in_time = feed.close(max(0.0, deadline - time.monotonic()))
            if feed.dropped or not in_time:
                hung = "" if in_time else ", and it has not closed in time"
                logger.warning("sink %s has missed %d records%s", feed.name, feed.dropped, hung)
        self.feeds = ()
