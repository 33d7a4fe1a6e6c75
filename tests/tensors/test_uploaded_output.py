"""Output of a worker in storage that cannot append: whole lines, bounded objects, outages, children, freed blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_faults import Fault, FaultyObjects

from elastic.runtime.worker.uploaded_output import UploadedOutput, worker_of
from elastic.store.local import LocalObjects

LIMIT_S = 60.0


@pytest.fixture
def objects(tmp_path: Path) -> FaultyObjects:
    return FaultyObjects(LocalObjects(str(tmp_path)))


@pytest.fixture
def output(objects: FaultyObjects) -> Iterator[UploadedOutput]:
    made = UploadedOutput(objects, "run", 3, every_s=0.01, most_bytes=64)
    made.start()
    yield made
    os.write(made.descriptor, b"end\n")
    assert made.flush(LIMIT_S), "the thread lives"


def texts(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted((folder / "run" / "logs").iterdir())]


def test_objects_hold_whole_lines_and_the_newest_grows(output: UploadedOutput, tmp_path: Path) -> None:
    lines = [f"line {number} of the output\n" for number in range(12)]
    for line in lines:
        os.write(output.descriptor, line.encode())
        assert output.flush(LIMIT_S)
        assert "".join(texts(tmp_path)).endswith(line)
    found = texts(tmp_path)
    assert "".join(found) == "".join(lines)
    assert len(found) > 3
    assert all(text.endswith("\n") and len(text) <= 64 for text in found)
    names = [file.name for file in sorted((tmp_path / "run" / "logs").iterdir())]
    assert names[0] == "worker-0003.000001.log"
    assert {worker_of(name) for name in names} == {3}


def test_a_line_longer_than_an_object_is_cut(output: UploadedOutput, tmp_path: Path) -> None:
    os.write(output.descriptor, b"x" * 200 + b"\nnext\n")
    assert output.flush(LIMIT_S)
    assert "".join(texts(tmp_path)) == "x" * 200 + "\nnext\n"


def test_an_outage_loses_nothing(output: UploadedOutput, objects: FaultyObjects, tmp_path: Path) -> None:
    objects.decide = lambda operation, number, path: Fault.FAIL if objects.calls["put"] < 4 else None
    os.write(output.descriptor, b"one\ntwo\n")
    assert output.flush(LIMIT_S)
    assert objects.calls["put"] >= 4
    assert "".join(texts(tmp_path)) == "one\ntwo\n"


def test_a_flush_has_a_limit(output: UploadedOutput, objects: FaultyObjects) -> None:
    objects.decide = lambda operation, number, path: Fault.FAIL
    os.write(output.descriptor, b"one\n")
    assert not output.flush(0.05)
    objects.decide = lambda operation, number, path: None


def test_output_of_children_is_in_order(output: UploadedOutput, tmp_path: Path) -> None:
    for number in range(3):
        os.write(output.descriptor, f"parent {number}\n".encode())
        code = f"import sys; print('child', {number}); print('error', {number}, file=sys.stderr)"
        descriptor = output.descriptor
        subprocess.run([sys.executable, "-c", code], stdout=descriptor, stderr=descriptor, check=True, timeout=LIMIT_S)
    assert output.flush(LIMIT_S)
    found = "".join(texts(tmp_path)).split("\n")
    assert [line for line in found if line.startswith("parent")] == ["parent 0", "parent 1", "parent 2"]
    assert sorted(line for line in found if line.startswith(("child", "error"))) == [
        "child 0", "child 1", "child 2", "error 0", "error 1", "error 2",
    ]  # fmt: skip


def test_what_was_copied_takes_no_room(objects: FaultyObjects, tmp_path: Path) -> None:
    output = UploadedOutput(objects, "run", 3, every_s=0.01, most_bytes=1 << 16)
    output.start()
    for _ in range(32):
        os.write(output.descriptor, (b"x" * 1023 + b"\n") * 64)
        assert output.flush(LIMIT_S)
    blocks = os.fstat(output.descriptor).st_blocks * 512
    assert os.fstat(output.descriptor).st_size == 32 << 16
    if blocks >= 32 << 16:
        pytest.skip("this file system frees no part of a file")
    assert blocks <= 4 << 16


@pytest.mark.parametrize("name", ["worker-0001.log", "worker-1.000001.log", "../worker-0001.000001.log", "other"])
def test_other_names_are_no_output(name: str) -> None:
    assert worker_of(name) is None
