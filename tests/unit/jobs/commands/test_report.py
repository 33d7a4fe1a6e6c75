"""`elastic report` and `elastic trace`: a file for a person, a file for Perfetto, and what cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elastic_jobs.cli import main
from sample_journal import journal

from elastic.observe.journal import JournalWriter


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    writer = JournalWriter(str(tmp_path), "r1")
    for record in journal()[1:]:
        writer.append({key: value for key, value in record.items() if key not in ("seq", "incarnation", "time")})
    (tmp_path / "r1" / "job.json").write_text(json.dumps({"name": "gpt", "config": {"lr": 0.002}}))
    return tmp_path


def test_a_report_is_written_whole(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = runs / "report.html"
    assert main(["report", "r1", "--storage", str(runs), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    document = target.read_text()
    assert document.startswith("<!doctype html>")
    assert "node-lost" in document
    assert "0.002" in document
    assert [file.name for file in runs.iterdir() if file.name.startswith(".")] == []


def test_energy_is_estimated_from_a_power_above_zero(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = runs / "report.html"
    writer = JournalWriter(str(runs), "r1")
    writer.append({"type": "ledger", "seconds": {"productive": 1.0}, "wall_s": 1.0, "held_s": {"productive": 3600.0}})
    assert main(["report", "r1", "--storage", str(runs), "-o", str(target), "--watts", "700"]) == 0
    assert "0.7 kWh, estimated from 700 W per accelerator held" in target.read_text()
    with pytest.raises(SystemExit):
        main(["report", "r1", "--watts", "-5"])
    assert "must be a number above zero, not -5" in capsys.readouterr().err


def test_a_trace_is_written(runs: Path) -> None:
    target = runs / "trace.json"
    assert main(["trace", "r1", "--storage", str(runs), "-o", str(target)]) == 0
    assert json.loads(target.read_text())["traceEvents"]


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_file_that_cannot_be_written_is_one_sentence(
    runs: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "r1", "--storage", str(runs), "-o", str(runs / "nowhere" / "x")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_run_that_does_not_exist_is_not_found(runs: Path, command: str) -> None:
    assert main([command, "r2", "--storage", str(runs)]) == 102
