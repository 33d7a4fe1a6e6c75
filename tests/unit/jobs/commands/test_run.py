"""`elastic run --from`: which weights a name or a folder stands for, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_jobs.cli import parser
from elastic_jobs.commands import run
from elastic_jobs.run_folder import RunFolder

from elastic.core.errors import RunNotFound, UsageError
from elastic.core.settings import WeightsSettings


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def main():\n    pass\n")
    file = tmp_path / "job.yaml"
    file.write_text("entry_point: train.py:main\nmax_workers: 2\nmax_steps: 3\n")
    return file


def weights(job: Path, *more: str) -> WeightsSettings | None:
    return run.prepare(parser().parse_args(["run", str(job), "--storage", "runs", *more])).job.settings.weights


def test_without_it_the_job_decides(job: Path, tmp_path: Path) -> None:
    assert weights(job) is None
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_text("")
    job.write_text(job.read_text() + "weights: {source: ./base, allow_missing: [head.*]}\n")
    assert weights(job) == WeightsSettings(str(tmp_path / "base"), ("head.*",))


def test_a_folder_and_what_may_differ(job: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_text("")
    found = weights(job, "--from", "base", "--allow-missing", "a.*", "--allow-missing", "b", "--allow-pickle")
    assert found == WeightsSettings(str(tmp_path / "base"), ("a.*", "b"), (), True)


def test_a_run_is_found_by_its_name(job: Path, tmp_path: Path) -> None:
    first = run.prepare(parser().parse_args(["run", str(job), "--storage", "runs", "--run-id", "first"]))
    RunFolder(first.job.settings.storage_url, "first").claim(first.job.record())
    found = weights(job, "--from", "first")
    assert found == WeightsSettings(str(tmp_path / "runs" / "first"))
    with pytest.raises(RunNotFound, match="first"):
        weights(job, "--from", "fist")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--allow-pickle",), "go with --from"),
        (("--from", "./nowhere"), "nowhere is empty or does not exist"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(job: Path, more: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        weights(job, *more)
