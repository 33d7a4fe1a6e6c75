"""A writer of storage can neither have code imported on the operator's machine nor get its token sent anywhere."""

from __future__ import annotations

import io
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from elastic_jobs import terminal
from elastic_jobs.running.run_plan import Job
from elastic_jobs.trust import check_address, check_code

from elastic.core.errors import UsageError
from elastic.core.settings import CheckpointSettings, RunSettings


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's folder, with code and storage in it."""
    folder = tmp_path / "own"
    (folder / "runs" / "r").mkdir(parents=True)
    for file in (folder / "train.py", folder / "runs" / "r" / "evil.py", tmp_path / "evil.py"):
        file.write_text("def train(config): ...\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return folder


def job(entry_point: str, folder: Path) -> Job:
    runs = str(Path.cwd() / "runs")
    return Job(RunSettings("r", checkpoint=CheckpointSettings(runs), storage_url=runs), entry_point, {}, str(folder))


def test_code_in_the_working_directory_is_the_operators_own(own: Path) -> None:
    (own / "linked.py").symlink_to(own.parent / "evil.py")
    for entry in ("train.py:train", f"{own}/train.py:train", "train:train", "linked:train"):
        check_code(job(entry, own), trusted=False)


@pytest.mark.parametrize(
    ("entry_point", "folder"),
    [
        ("{top}/evil.py:train", "{own}"),
        ("evil:train", "{top}"),
        ("os:system", "{own}"),
        # In the working directory, but in the storage there: that is where the attacker writes.
        ("evil.py:train", "{own}/runs/r"),
        ("{own}/runs/../runs/r/evil.py:train", "{own}"),
        ("linked.py:train", "{own}"),
    ],
)
def test_code_that_only_storage_names_is_refused(own: Path, entry_point: str, folder: str) -> None:
    (own / "linked.py").symlink_to(own / "runs" / "r" / "evil.py")
    places = {"own": str(own), "top": str(own.parent)}
    named = job(entry_point.format(**places), Path(folder.format(**places)))
    with pytest.raises(UsageError, match="name the job file with --job, or use --trust-storage"):
        check_code(named, trusted=False)
    check_code(named, trusted=True)


def test_an_address_counts_where_the_operators_environment_names_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"10\.6\.6\.6:6379, which would get this machine's Ray token"):
        check_address("r", "10.6.6.6:6379", None, trusted=False)
    check_address("r", "10.6.6.6:6379", None, trusted=True)
    monkeypatch.setenv("RAY_ADDRESS", "10.6.6.6:6379")
    check_address("r", "10.6.6.6:6379", None, trusted=False)
    with pytest.raises(UsageError):
        check_address("r", "10.6.6.6:6380", None, trusted=False)


def test_a_local_cluster_is_known_by_its_own_socket(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keeper.sock"
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(file))
        check_address("r", "LOCALHOST:6379", str(file), trusted=False)
        # The socket is ours, but the address leads elsewhere.
        with pytest.raises(UsageError):
            check_address("r", "10.6.6.6:6379", str(file), trusted=False)
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
        with pytest.raises(UsageError):
            check_address("r", "LOCALHOST:6379", str(file), trusted=False)
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(UsageError):
        check_address("r", "LOCALHOST:6379", str(tmp_path / "file"), trusted=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("yes\n", True), ("\n", False), ("", False)])
def test_on_a_terminal_it_asks(own: Path, answer: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Terminal()
    monkeypatch.setattr(terminal.sys, "stdin", Terminal(answer))
    monkeypatch.setattr(terminal.sys, "stderr", asked)
    named = replace(job("evil:train", own.parent))
    if goes_on:
        check_code(named, trusted=False)
    else:
        with pytest.raises(UsageError):
            check_code(named, trusted=False)
    assert asked.getvalue().endswith("Import and run it? [y/N]\n")
