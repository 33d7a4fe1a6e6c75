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
    for name, rows in (("r1", ROWS), ("bare", []), ("asked", ROWS)):
        writer = JournalWriter(str(tmp_path), name)
        writer.append({"type": "run", "run_id": name, "status": "running"})
        writer.append({"type": "generation", "number": 1, "world_size": 4, "first_step": 1})
        step = {"generation": 1, "duration_s": 0.5, "collectives": [row.to_json() for row in rows]}
        travel = {1: {"travel": "ring: as the job says"}} if name == "asked" else {}
        writer.append(
            {"type": "steps", "steps": [{**step, "step": number, **travel.get(number, {})} for number in (1, 2, 3)]}
        )
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


def test_how_gradients_travel_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "asked", "--storage", str(runs)]) == 0
    assert "from step 1 on gradients travel by ring: as the job says" in capsys.readouterr().out.splitlines()


def test_what_only_some_steps_have_counts_as_often(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three islands in rounds of four steps."""
    writer = JournalWriter(str(tmp_path), "r1")
    writer.append({"type": "run", "run_id": "r1", "status": "running"})
    writer.append({"type": "generation", "number": 1, "world_size": 6, "first_step": 1})
    inside = CollectiveUse("all_reduce", "node, 2 ranks", "float32", 1, 1_000_000, 0.01, 0.01)
    across = CollectiveUse("all_reduce", "nodes, 3 ranks", "float32", 1, 3_000_000, 0.04, 0.04)
    for number in range(1, 10):
        rows = [inside, across] if number % 4 == 0 else [inside]
        step = {"generation": 1, "duration_s": 0.5, "step": number, "collectives": [row.to_json() for row in rows]}
        writer.append({"type": "steps", "steps": [step]})
    (tmp_path / "r1" / "job.json").write_text(json.dumps({"name": "gpt"}))
    assert main(["wire", "r1", "--storage", str(tmp_path)]) == 0
    first, second, total = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[2:5])
    assert first == "all_reduce nodes, 3 ranks float32 1 3.0 MB 4.0 MB 40.0 ms 40.0 ms 0.25 of steps"
    assert second == "all_reduce node, 2 ranks float32 1 1.0 MB 1.0 MB 10.0 ms 10.0 ms 1 of steps"
    assert total.startswith("each rank sends about 2.0 MB per step of 500.0 ms; 20.0 ms in collectives")


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
