"""The controller's records while storage is away, slow, or fine: in order, and no decision waits for more than one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic.core.errors import Fenced, StorageError
from elastic.runtime.controller.records import Records

LIMIT_S = 20.0


class Away:
    """A journal whose storage fails while `failing`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.failing = False

    def extend(self, records: Sequence[dict[str, Any]]) -> None:
        if self.failing:
            raise StorageError("no route to storage")
        self.lines += records


def test_lines_wait_in_order_while_storage_is_away() -> None:
    async def scenario() -> list[Any]:
        away: Any = Away()
        records = Records(retry_s=0.0)
        records.open(away)
        records.note({"n": 1})
        away.failing = True
        await records.write([{"n": 2}])
        assert records.failing
        assert records.pending
        away.failing = False
        await records.write([{"n": 3}])
        assert not records.failing
        return [line["n"] for line in away.lines]

    assert asyncio.run(scenario()) == [1, 2, 3]


class Slow(Away):
    """A journal whose storage answers when `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def extend(self, records: Sequence[dict[str, Any]]) -> None:
        assert self.gate.wait(LIMIT_S)
        super().extend(records)


def test_storage_that_does_not_answer_keeps_nobody_waiting() -> None:
    async def scenario() -> list[Any]:
        slow: Any = Slow()
        records = Records(limit_s=0.01)
        records.open(slow)
        await records.write([{"n": 1}])
        assert records.failing
        await records.write([{"n": 2}])
        assert slow.lines == []
        slow.gate.set()
        await records.write([{"n": 3}], limit_s=LIMIT_S)
        assert not records.failing
        assert not records.pending
        return [line["n"] for line in slow.lines]

    assert asyncio.run(scenario()) == [1, 2, 3]


def test_the_journal_does_not_wait_for_other_threads() -> None:
    async def scenario() -> list[Any]:
        away: Any = Away()
        records, gate = Records(), threading.Event()
        records.open(away)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        begun = threading.Event()
        busy = asyncio.get_running_loop().run_in_executor(None, lambda: begun.set() or gate.wait(LIMIT_S))
        try:
            assert begun.wait(LIMIT_S)
            await records.write([{"n": 1}])
            assert not busy.done()
            return list(away.lines)
        finally:
            gate.set()
            await busy

    assert asyncio.run(scenario()) == [{"n": 1}]


def test_a_decision_waits_for_one_append_and_notes_are_written_with_the_next_events() -> None:
    async def scenario() -> list[int]:
        class Counting(Away):
            def __init__(self) -> None:
                super().__init__()
                self.appends: list[int] = []

            def extend(self, records: Sequence[dict[str, Any]]) -> None:
                self.appends.append(len(records))
                super().extend(records)

        journal: Any = Counting()
        records = Records()
        records.open(journal)
        for n in range(5):
            await records.write([{"n": n}])
            records.note({"note": n})
            records.note({"note": n})
        await records.start()
        await records.write(limit_s=LIMIT_S)
        assert records.noted == records.durable == 15
        return list(journal.appends)

    assert asyncio.run(scenario()) == [1, 3, 3, 3, 3, 2]


def test_a_failed_write_is_not_tried_again_by_every_turn() -> None:
    async def scenario() -> int:
        class Trying(Away):
            tries = 0

            def extend(self, records: Sequence[dict[str, Any]]) -> None:
                self.tries += 1
                super().extend(records)

        away: Any = Trying()
        away.failing = True
        records = Records(retry_s=LIMIT_S)
        records.open(away)
        for n in range(100):
            await records.write([{"n": n}])
        assert records.pending
        return int(away.tries)

    assert asyncio.run(scenario()) == 1


def test_a_write_in_the_background_that_is_fenced_ends_the_controller() -> None:
    async def scenario() -> None:
        class Taken(Away):
            def extend(self, records: Sequence[dict[str, Any]]) -> None:
                raise Fenced("another one has taken over")

        journal: Any = Taken()
        records = Records()
        records.open(journal)
        records.note({"n": 1})
        await records.start()
        assert records._writing is not None
        await asyncio.wait((records._writing.call,))
        with pytest.raises(Fenced):
            await records.start()

    asyncio.run(scenario())
