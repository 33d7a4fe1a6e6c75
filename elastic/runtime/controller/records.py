"""The controller's records on their way to the journal: written in order; they wait in memory while storage is away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.core.errors import Fenced, StorageError
from elastic.observe.journal import JournalWriter
from elastic.observe.records import Record, decision
from elastic.observe.segments import Mark
from elastic.observe.sinks import Sinks

logger = logging.getLogger(__name__)

# A store that takes longer does not delay the run: nothing is decided meanwhile, and a request may take minutes.
WRITE_LIMIT_S = 5.0
# While writes are known to fail: enough to notice that they succeed again.
_FAILING_LIMIT_S = 0.5
# A failed write is tried again after this pause, however many turns there are meanwhile.
_RETRY_S = 0.5
# Characters of the journal after which a replay point is due: some thousand steps or events, 0.1 s of a restart.
UNABRIDGED = 1 << 20


@dataclass
class _Writing:
    """The first `count` waiting records are being written. `late`: the write has exceeded its limit once."""

    call: asyncio.Future[Any]
    count: int
    late: bool = False


@dataclass
class _Point:
    """A replay point after the first `count` records (see `JournalWriter.save_point`) or `abridges` characters."""

    make: Callable[[], Mapping[str, Any]]
    count: int
    mark: Mark
    abridges: int
    saving: bool = False


class Records:
    """`note` and `start` from the event loop, `write` from the controller's loop only.

    `noted` counts all records, `durable` those that are in the journal: the first so many.
    """

    def __init__(self, limit_s: float = WRITE_LIMIT_S, retry_s: float = _RETRY_S) -> None:
        self._limit_s = limit_s
        self._retry_s = retry_s
        self._retry_at = 0.0
        self._journal: JournalWriter | None = None
        self._sinks: Sinks | None = None
        self._waiting: list[Record] = []
        self._writing: _Writing | None = None
        # A thread of its own: the loop's threads may all be waiting for something else.
        self._thread = ThreadPoolExecutor(1, "elastic-journal")
        # And one for replay points: a slow one must not delay an append.
        self._points = ThreadPoolExecutor(1, "elastic-points")
        self._point: _Point | None = None
        # Of what the journal has read and written, so much is in a replay point; beyond the limit another one is due.
        self._abridged, self._unabridged_limit = 0, UNABRIDGED
        self.failing = False
        self.noted = 0
        self.durable = 0

    @property
    def point_is_due(self) -> bool:
        """So much has been written since the last replay point that a restart would take long to read it."""
        return self._point is None and self._unabridged > self._unabridged_limit

    @property
    def _unabridged(self) -> int:
        return self._journal.read_and_written - self._abridged if self._journal is not None else 0

    def keep_point(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """What is known after all records noted so far becomes a replay point once they are durable. `make` gives its
        content, on another thread. Never waited for; after a failure the next one that is due is tried."""
        assert self._journal is not None
        self._point = _Point(make, self.noted, self._journal.mark(), self._journal.read_and_written)
        self._save_point()

    def _save_point(self) -> None:
        """Begin to save the waiting point, if its records are durable."""
        point, journal = self._point, self._journal
        if point is None or journal is None or point.saving or self.durable < point.count:
            return
        point.saving = True

        def save() -> int:
            return journal.save_point(point.make(), point.count, point.mark)

        call = asyncio.get_running_loop().run_in_executor(self._points, save)
        call.add_done_callback(partial(self._point_saved, point))

    def _point_saved(self, point: _Point, call: asyncio.Future[int]) -> None:
        self._point = None
        if call.cancelled():
            return
        error = call.exception()
        if error is None:
            self._abridged, self._unabridged_limit = point.abridges, max(UNABRIDGED, call.result())
        elif not isinstance(error, Fenced):
            self._unabridged_limit = self._unabridged + UNABRIDGED
            logger.warning("no replay point was written, so a restart reads more of the journal: %s", error)

    def open(self, journal: JournalWriter, sinks: Sinks | None = None) -> None:
        """`sinks` get every record too; they are never waited for."""
        self._journal = journal
        self._sinks = sinks

    def note(self, record: Record) -> None:
        """To be written with the next `write` or `start`."""
        self.noted += 1
        self._waiting.append(record)
        if self._sinks is not None:
            self._sinks.put(record)

    @property
    def pending(self) -> bool:
        """Records wait, and no write is under way."""
        return bool(self._waiting) and self._writing is None

    async def start(self) -> None:
        """Begin to write what waits, without waiting for it. Raises Fenced as `write` does."""
        if self._writing is not None and self._writing.call.done():
            self._settle()
        if self._writing is None:
            self._begin()

    async def write(self, records: Sequence[Record] = (), limit_s: float | None = None) -> None:
        """Durable on return, unless storage is away or slow: training then continues, and the records are tried again
        with the next ones. With `limit_s` this waits for that long, whatever happened before.

        Raises Fenced when a newer controller writes this journal, and TypeError or ValueError for a record that JSON
        cannot represent; a note about it then waits in its place.
        """
        for record in records:
            self.note(record)
        wanted, limit = self.noted, self._limit(limit_s)
        deadline = time.monotonic() + limit
        while self.durable < wanted and self._journal is not None:
            # One that is under way has not got all records: another one follows it.
            writing = self._writing or self._begin(forced=limit_s is not None)
            if writing is None:
                return
            whole, left_s = writing.count + self.durable >= wanted, max(0.0, deadline - time.monotonic())
            if not (await asyncio.wait((writing.call,), timeout=0.0 if writing.late and limit_s is None else left_s))[
                0
            ]:
                writing.late = True
                self._fails("it has not answered yet")
                return
            if not self._settle() and whole:
                return

    def _begin(self, forced: bool = False) -> _Writing | None:
        """None when nothing waits, or when the last try has just failed."""
        paused = self.failing and not forced and time.monotonic() < self._retry_at
        if self._journal is None or not self._waiting or paused:
            return None
        lines = list(self._waiting)
        call = asyncio.get_running_loop().run_in_executor(self._thread, self._journal.extend, lines)
        self._writing = _Writing(call, len(lines))
        return self._writing

    def _settle(self) -> bool:
        """The write under way has ended; whether it succeeded."""
        writing, self._writing = self._writing, None
        assert writing is not None
        try:
            writing.call.result()
        except StorageError as error:
            self._retry_at = time.monotonic() + self._retry_s
            self._fails(str(error))
            return False
        except (TypeError, ValueError):
            # Nothing behind it would ever be written.
            self._waiting = [_writable(record) for record in self._waiting]
            raise
        del self._waiting[: writing.count]
        self.durable += writing.count
        self._save_point()
        self.failing = False
        return True

    def _limit(self, limit_s: float | None) -> float:
        if limit_s is not None:
            return limit_s
        return _FAILING_LIMIT_S if self.failing else self._limit_s

    def _fails(self, why: str) -> None:
        if not self.failing:
            logger.warning("the journal cannot be written (%s): %d records wait in memory", why, len(self._waiting))
        self.failing = True


def _writable(record: Record) -> Record:
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        sentence = f"a record of type {record.get('type')!r} cannot be written ({error}) and is left out"
        what = {"record": repr(record)[:2000]}
        return decision("unwritable", sentence, step=0, generation=0, world_size=0, data=what)
    return record
