"""The job that tests of the command line start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_fakes import JOB


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    # The operator's own name for the cluster that is in most of the runs' folders.
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    (tmp_path / "cli_train.py").write_text("def main(config): ...\n")
    (tmp_path / "job.yaml").write_text(JOB)
    yield tmp_path / "job.yaml"
    __import__("sys").modules.pop("cli_train", None)
