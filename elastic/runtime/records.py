"""The controller's pen: what is noted goes to the journal in order, and waits in memory while storage is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from elastic.core.errors import StorageError
from elastic.observe.journal import JournalWriter

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Records:
    """`note` from the event loop, `write` from the controller's loop only."""

    def __init__(self) -> None:
        self._journal: JournalWriter | None = None
        self._waiting: list[Record] = []
        self.failing = False

    def open(self, journal: JournalWriter) -> None:
        self._journal = journal

    def note(self, record: Record) -> None:
        """To be written with the next `write`."""
        self._waiting.append(record)

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    async def write(self, records: Sequence[Record] = ()) -> None:
        """Durable on return, unless storage is away: training goes on then and the lines are tried with the next ones.

        Raises Fenced when a newer controller writes this journal.
        """
        self._waiting += records
        lines = list(self._waiting)
        if not lines or self._journal is None:
            return
        try:
            await asyncio.to_thread(self._journal.extend, lines)
        except StorageError as error:
            if not self.failing:
                logger.warning("the journal cannot be written (%s): %d lines wait in memory", error, len(lines))
            self.failing = True
        else:
            del self._waiting[: len(lines)]
            self.failing = False
