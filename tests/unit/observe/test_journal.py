"""The journal: one writer at a time, nothing lost, nothing that a fenced controller wrote believed."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import pytest
from journal_contract import *  # noqa: F403 - the tests of the contract, with this module's fixture

from elastic.core.errors import StorageError, UsageError
from elastic.observe.journal import JournalReader, JournalWriter
from elastic.observe.journal_lines import to_line
from elastic.observe.open_segments import open_segments


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "file" else f"memory://journal-{uuid.uuid4().hex}"


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
    whole = to_line({"seq": 3, "type": "torn"})
    torn = whole[:19]
    with open(path, "a") as file:
        file.write(torn)
    JournalWriter(str(tmp_path), "run")
    with open(path, "a") as file:
        file.write(whole[len(torn) :])
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


def test_a_run_id_cannot_lead_out_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run id"):
        JournalReader(str(tmp_path), "../x")
