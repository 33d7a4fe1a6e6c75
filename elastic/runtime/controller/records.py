"""The controller's records on their way to the journal: written in order; they wait in memory while storage is away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic.core.errors import StorageError
from elastic.observe.journal import JournalWriter
from elastic.observe.records import Record, decision
from elastic.observe.sinks import Sinks

logger = logging.getLogger(__name__)

# A store that takes longer does not delay the run: nothing is decided meanwhile, and a request may take minutes.
WRITE_LIMIT_S = 5.0
# While writes are known to fail: enough to notice that they succeed again.
_FAILING_LIMIT_S = 0.5
# A failed write is tried again after this pause, however many turns there are meanwhile.
_RETRY_S = 0.5


@dataclass
class _Writing:
    """The first `count` waiting records are being written. `late`: the write has exceeded its limit once."""

    call: asyncio.Future[Any]
    count: int
    late: bool = False


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
        self.failing = False
        self.noted = 0
        self.durable = 0

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
        """Durable on return, unless storage is away or slow: training then goes on, and the records are tried again
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
