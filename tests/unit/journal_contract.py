"""What a journal must do in every kind of storage: tests on the fixture `url`, run wherever they are imported."""

from __future__ import annotations

import pytest

from elastic.core.errors import Fenced, RunNotFound
from elastic.observe.journal import JournalReader, JournalWriter, cursor
from elastic.observe.journal_lines import to_line


def kinds(url: str) -> list[str]:
    return [record["type"] for record in JournalReader(url, "run").records()]


def test_records_come_back_stamped_and_in_order(url: str) -> None:
    writer = JournalWriter(url, "run", clock=lambda: 12.5)
    writer.append({"type": "decision", "sentence": "a line\nwith a break, and é", "seq": 99})
    writer.extend([{"type": "run", "status": "running"}, {"type": "checkpoint", "id": "c"}])
    records = JournalReader(url, "run").records()
    assert [r["seq"] for r in records] == [1, 2, 3, 4]
    assert [r["type"] for r in records] == ["begin", "decision", "run", "checkpoint"]
    assert records[1] == {
        "seq": 2, "incarnation": 1, "time": 12.5, "type": "decision", "sentence": "a line\nwith a break, and é",
    }  # fmt: skip


def test_reading_goes_on_after_a_cursor(url: str) -> None:
    writer = JournalWriter(url, "run")
    known = writer.append({"type": "a"})
    reader = JournalReader(url, "run")
    assert reader.records(cursor(known)) == []
    writer.append({"type": "b"})
    second = JournalWriter(url, "run")
    second.append({"type": "c"})
    assert [r["type"] for r in reader.records(cursor(known))] == ["b", "begin", "c"]


def test_a_new_controller_replays_and_fences_the_old_one(url: str) -> None:
    old = JournalWriter(url, "run")
    old.append({"type": "a"})
    new = JournalWriter(url, "run")
    assert new.incarnation == 2
    assert [r["type"] for r in new.replayed] == ["begin", "a"]
    with pytest.raises(Fenced, match="incarnation 2 has taken over"):
        old.append({"type": "late"})
    assert kinds(url) == ["begin", "a", "begin"]


def test_one_incarnation_belongs_to_one_controller(url: str) -> None:
    JournalWriter(url, "run", 3)
    with pytest.raises(Fenced, match="incarnation 3"):
        JournalWriter(url, "run", 3)
    with pytest.raises(Fenced, match="taken over"):
        JournalWriter(url, "run", 2)


def test_what_a_zombie_wrote_is_left_out_and_reported(url: str) -> None:
    old = JournalWriter(url, "run")
    old.append({"type": "a"})
    # The zombie had checked before the new one claimed: its write reaches the store afterwards.
    segments = old._segments
    JournalWriter(url, "run").append({"type": "b"})
    segments.append(1, to_line({"seq": 3, "type": "zombie"}))
    reader = JournalReader(url, "run")
    assert [r["type"] for r in reader.records()] == ["begin", "a", "begin", "b"]
    (problem,) = reader.problems
    assert problem.kind == "fenced"
    assert problem.record is not None
    assert problem.record["type"] == "zombie"
    # A third controller does not believe it either.
    assert [r["type"] for r in JournalWriter(url, "run").replayed] == ["begin", "a", "begin", "b"]


def test_no_journal_is_run_not_found(url: str) -> None:
    with pytest.raises(RunNotFound, match="run"):
        JournalReader(url, "run").records()
