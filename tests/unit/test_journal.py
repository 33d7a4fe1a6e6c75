"""The journal: one writer at a time, nothing lost, nothing that a fenced controller wrote believed."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import pytest

from elastic.core.errors import Fenced, RunNotFound, StorageError, UsageError
from elastic.observe.journal import JournalReader, JournalWriter, cursor
from elastic.observe.segments import open_segments


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "file" else f"memory://journal-{uuid.uuid4().hex}"


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
    segments.append(1, '{"seq":3,"type":"zombie"}\n')
    reader = JournalReader(url, "run")
    assert [r["type"] for r in reader.records()] == ["begin", "a", "begin", "b"]
    (problem,) = reader.problems
    assert problem.kind == "fenced"
    assert problem.record is not None
    assert problem.record["type"] == "zombie"
    # A third controller does not believe it either.
    assert [r["type"] for r in JournalWriter(url, "run").replayed] == ["begin", "a", "begin", "b"]


def test_a_torn_last_line_is_said_and_left_out(tmp_path: Path) -> None:
    JournalWriter(str(tmp_path), "run").append({"type": "a"})
    with open(tmp_path / "run/journal/000001.jsonl", "a") as file:
        file.write('{"seq":3,"type":"to')
    reader = JournalReader(str(tmp_path), "run")
    assert [r["type"] for r in reader.records()] == ["begin", "a"]
    assert [p.kind for p in reader.problems] == ["torn"]


def test_a_torn_line_that_a_zombie_completes_later_is_fenced(tmp_path: Path) -> None:
    JournalWriter(str(tmp_path), "run").append({"type": "a"})
    path = tmp_path / "run/journal/000001.jsonl"
    with open(path, "a") as file:
        file.write('{"seq":3,"type":"to')
    JournalWriter(str(tmp_path), "run")
    with open(path, "a") as file:
        file.write('rn"}\n')
    reader = JournalReader(str(tmp_path), "run")
    assert [r["type"] for r in reader.records()] == ["begin", "a", "begin"]
    assert [p.kind for p in reader.problems] == ["fenced"]


def test_a_damaged_line_in_the_middle_is_said_and_left_out(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), "run")
    writer.append({"type": "a"})
    path = tmp_path / "run/journal/000001.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"seq":2', b'\xff"seq":2'))
    writer.append({"type": "b"})
    reader = JournalReader(str(tmp_path), "run")
    assert [r["type"] for r in reader.records()] == ["begin", "b"]
    assert [p.kind for p in reader.problems] == ["damaged"]


def test_a_full_disk_loses_nothing_that_was_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(str(tmp_path), "run")
    real, calls = os.pwrite, iter([True, False])

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if next(calls):
            return real(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            writer.append({"type": "a"})
    assert writer.append({"type": "a"})["seq"] == 2
    reader = JournalReader(str(tmp_path), "run")
    assert [r["type"] for r in reader.records()] == ["begin", "a"]
    assert reader.problems == ()


def test_a_store_nobody_knows_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nosuch"):
        open_segments("nosuch://bucket", "run")


def test_no_journal_is_run_not_found(url: str) -> None:
    with pytest.raises(RunNotFound, match="run"):
        JournalReader(url, "run").records()


def test_a_run_id_cannot_lead_out_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run id"):
        JournalReader(str(tmp_path), "../x")
