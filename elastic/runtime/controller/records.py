"""The controller's pen: what is noted goes to the journal in order, and waits in memory while storage is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastic.core.errors import StorageError
from elastic.observe.journal import JournalWriter
from elastic.observe.records import Record
from elastic.observe.sinks import Sinks

logger = logging.getLogger(__name__)

# A store that takes longer does not keep the run waiting: nothing is decided meanwhile, and a request may take minutes.
WRITE_LIMIT_S = 5.0
# While it is known to fail: enough to see that it does not any more.
_FAILING_LIMIT_S = 0.5


@dataclass
class _Writing:
    """The first `count` lines that wait are on their way. `late`: it was waited for already."""

    call: asyncio.Future[Any]
    count: int
    late: bool = False


class Records:
    """`note` from the event loop, `write` from the controller's loop only."""

    def __init__(self, limit_s: float = WRITE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._journal: JournalWriter | None = None
        self._sinks: Sinks | None = None
        self._waiting: list[Record] = []
        self._writing: _Writing | None = None
        # Of its own: the loop's usual threads may all be waiting for something else.
        self._thread = ThreadPoolExecutor(1, "elastic-journal")
        self.failing = False

    def open(self, journal: JournalWriter, sinks: Sinks | None = None) -> None:
        """`sinks` get every record too; they are never waited for."""
        self._journal = journal
        self._sinks = sinks

    def note(self, record: Record) -> None:
        """To be written with the next `write`."""
        self._waiting.append(record)
        if self._sinks is not None:
            self._sinks.put(record)

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    async def write(self, records: Sequence[Record] = (), limit_s: float | None = None) -> None:
        """Durable on return, unless storage is away or slow: training goes on then and the lines are tried with the
        next ones. With `limit_s` it is waited for that long, whatever it did before.

        Raises Fenced when a newer controller writes this journal.
        """
        for record in records:
            self.note(record)
        while self._waiting and self._journal is not None:
            fresh = self._writing is None
            writing = self._writing = self._writing or self._begun(self._journal)
            if not (await asyncio.wait((writing.call,), timeout=self._limit(writing, limit_s)))[0]:
                writing.late = True
                self._fails("it has not answered yet")
                return
            self._writing = None
            try:
                writing.call.result()
            except StorageError as error:
                self._fails(str(error))
                if fresh:
                    return
            else:
                del self._waiting[: writing.count]
                self.failing = False

    def _begun(self, journal: JournalWriter) -> _Writing:
        lines = list(self._waiting)
        call = asyncio.get_running_loop().run_in_executor(self._thread, journal.extend, lines)
        return _Writing(call, len(lines))

    def _limit(self, writing: _Writing, limit_s: float | None) -> float:
        if limit_s is not None:
            return limit_s
        return 0.0 if writing.late else _FAILING_LIMIT_S if self.failing else self._limit_s

    def _fails(self, why: str) -> None:
        if not self.failing:
            logger.warning("the journal cannot be written (%s): %d lines wait in memory", why, len(self._waiting))
        self.failing = True
