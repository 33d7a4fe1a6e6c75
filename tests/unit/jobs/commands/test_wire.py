"""`elastic wire`: a table for a person, an object for a program, and a run that has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elastic_jobs.cli import main

from elastic.core.data.collectives import CollectiveUse
from elastic.observe.journal import JournalWriter

ROWS = [
    CollectiveUse("all_reduce", "dp", "float32", 2, 3_000_000, 0.05, 0.03),
    CollectiveUse("all_gather_into_tensor", "dp", "float32", 1, 3_000_000, 0.02, 0.02),
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, rows in (("r1", ROWS), ("bare", [])):
        writer = JournalWriter(str(tmp_path), name)
        writer.append({"type": "run", "run_id": name, "status": "running"})
        writer.append({"type": "generation", "number": 1, "world_size": 4, "first_step": 1})
        step = {"generation": 1, "duration_s": 0.5, "collectives": [row.to_json() for row in rows]}
        writer.append({"type": "steps", "steps": [{**step, "step": number} for number in (1, 2, 3)]})
        (tmp_path / name / "job.json").write_text(json.dumps({"name": "gpt"}))
    return tmp_path


def test_a_table_with_what_is_sent_and_advice(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "r1", "--storage", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "generation 1, 4 ranks, steps 2 to 3: rank 0, medians of a step"
    gather, reduce, total = (" ".join(line.split()) for line in lines[2:5])
    assert gather == "all_gather_into_tensor dp float32 1 3.0 MB 2.2 MB 20.0 ms 20.0 ms"
    assert reduce == "all_reduce dp float32 2 3.0 MB 4.5 MB 50.0 ms 30.0 ms"
    assert total.startswith(
        "each rank sends about 6.8 MB per step of 500.0 ms; 70.0 ms in collectives, 50.0 ms of which"
    )
    assert lines[5].startswith("advice: gradients travel by all-reduce")


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "r1", "--storage", str(runs), "--generation", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["world_size"], told["rows"][1]["op"], told["rows"][1]["sent_bytes"]) == (4, "all_reduce", 4_500_000)
    assert len(told["advice"]) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["bare"], "no collectives of any generation"), (["r1", "--generation", "9"], "no collectives of generation 9")],
)
def test_a_run_without(runs: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", *words, "--storage", str(runs)]) != 0
    assert sentence in capsys.readouterr().err
