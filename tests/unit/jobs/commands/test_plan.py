"""`elastic plan` and `elastic laws` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import cli

from elastic.core import events as ev
from elastic.observe.journal import JournalWriter
from elastic.planner import Constants

JOB = """
entry_point: train.py:main
max_workers: 8
deepspeed: {train_batch_size: 64, bf16: {enabled: true}, zero_optimization: {stage: 2, reduce_bucket_size: 1000000}}
"""
SIZES = "layers=24,hidden=2048,heads=16,vocabulary=50257,sequence=1024"


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(JOB)
    return str(tmp_path / "job.yaml")


def main(*arguments: str) -> int:
    return cli.main(list(arguments), backend=object())  # type: ignore[arg-type]


def test_the_table_ranks_refuses_and_shows_the_job_as_it_is(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main("plan", job, "--nodes", "2x8xA100", "--model", SIZES, "--top", "3") == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0] == "1.31 B parameters on 2 nodes of 8 A100, 64 samples of 1024 tokens a step"
    assert [line.split()[0] for line in lines[4:7]] == ["1", "2", "3"]
    assert any(line.startswith("Memory of the fullest rank of 1, GiB: weights") for line in lines)
    assert any("all_reduce over dp" in line or "all_gather over dp" in line for line in lines)
    assert any("pipeline with ZeRO: DeepSpeed's pipeline engine" in line for line in lines)
    assert lines[-2] == "The job as it is:"
    assert lines[-1].split()[:3] == ["dp16", "2", "1"]


def test_json_gives_every_candidate(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main("plan", job, "--nodes", "1x8xA100", "--model", SIZES, "--axes", "dp", "--json") == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {row["mesh"]["dp"] for row in rows} == {8}
    assert rows[0]["step_s"] > 0
    assert rows[0]["memory_total_bytes"] > 0
    # The job's own bucket size: two bytes for each of a million elements.
    stage_2 = next(row for row in rows if row["strategy"]["zero_stage"] == 2 and not row["refusal"])
    assert stage_2["memory"]["buffers"] == 2_000_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "does not say how large the model is; give --model NAME"),
        (["--model", "gpt2", "--axes", "dp,cp"], "unknown axis 'cp'"),
        (["--model", "gpt7"], "no model is called 'gpt7'"),
    ],
)
def test_what_is_missing_or_unknown_is_said_in_one_sentence(
    job: str, words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main("plan", job, "--nodes", "1x8xA100", *words) == 2
    err = capfd.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [("--network", "-1"), ("--host-memory", "inf"), ("--spare", "-1"), ("--network", "nan")]
)
def test_numbers_that_make_no_sense_are_refused(job: str, words: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as left:
        main("plan", job, "--nodes", "1x8xA100", "--model", "gpt2", *words)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("zero_optimization: 2", "zero_optimization must be a mapping"),
        ("zero_optimization: {stage: 7}", "zero_stage must"),
    ],
)
def test_a_deepspeed_section_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, section: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(f"entry_point: t.py:main\nmax_workers: 8\ndeepspeed: {{{section}}}\n")
    words = ("--nodes", "1x8xA100", "--model", "gpt2", "--global-batch", "64")
    assert main("plan", str(tmp_path / "job.yaml"), *words) == 2
    assert says in capfd.readouterr().err


def test_a_job_without_a_batch_says_how_to_give_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("entry_point: train.py:main\nmax_workers: 8\n")
    path = str(tmp_path / "job.yaml")
    assert main("plan", path, "--nodes", "1x8xA100", "--model", "gpt2") == 2
    assert "does not say the global batch; give --global-batch N" in capfd.readouterr().err
    assert main("plan", path, "--nodes", "1x8xA100", "--model", "gpt2", "--global-batch", "64") == 0
    assert "enables neither bf16 nor fp16; the plan is for bf16" in capfd.readouterr().err


def test_laws_give_the_optimum_with_intervals_and_its_cost(capfd: pytest.CaptureFixture[str]) -> None:
    assert main("laws", "--flops", "5.76e23", "--nodes", "64x8xH100") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "5.76e+23 FLOPs buy most with 72.2 B parameters and 1.33 T tokens"
    assert "loss at most 0.01 nats higher: 26.6 B to 195 B parameters" in lines[2]
    assert "GPU-hours" in lines[5]


def test_laws_say_why_nothing_fits(capfd: pytest.CaptureFixture[str]) -> None:
    assert main("laws", "--flops", "1e27", "--nodes", "1x8xA100") == 0
    assert "no plan for" in capfd.readouterr().out.splitlines()[-1]
    assert main("laws", "--flops", "1") == 2
    assert "--flops must lie between" in capfd.readouterr().err


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Runs that have measured: connections of 2 GB/s between hosts and faster ones within one; only such; nothing."""
    alpha_s, rate = 40e-6, 2e9
    for name, kinds in (("r1", ("same host", "same zone", "same zone")), ("alone", ("same host",)), ("bare", ())):
        writer = JournalWriter(str(tmp_path), name)
        writer.append({"type": "run", "run_id": name, "status": "running"})
        for number, kind in enumerate(kinds):
            beta = 1 / rate if kind == "same zone" else 1e-11
            points = tuple((size, alpha_s + beta * size) for size in (1 << 10, 256 << 10, 4 << 20))
            event = ev.NodeMeasured(f"n{number}", (("gemm", 1e11),), "p", kind, points, points)
            writer.append({"type": "event", "now": 1.0, "number": number + 1, **ev.to_json(event)})
    return tmp_path


def test_the_network_that_a_run_has_measured_is_taken(
    job: str, measured: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ("plan", job, "--nodes", "4x8xA100", "--model", SIZES, "--axes", "dp", "--json")
    assert main(*plan, "--from", "r1", "--storage", str(measured)) == 0
    out, err = capfd.readouterr()
    assert "network of run r1: 2 connections (same zone), 40 us and 2 GB/s over TCP, knee 1" in err
    assert main(*plan, "--network", str(2 * 8 / Constants().node_fraction)) == 0
    same = json.loads(capfd.readouterr().out.splitlines()[0])["step_s"]
    assert json.loads(out.splitlines()[0])["step_s"] == pytest.approx(same, rel=0.02)
    assert main(*plan) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[0])["step_s"] < same / 2, "the usual network is far faster"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "bare"], "run bare has measured no connection between two hosts; with calibration"),
        (["--from", "alone"], "run alone has measured no connection between two hosts"),
        (["--from", "r1", "--network", "10"], "--network and --from both say what the network is"),
        (["--from", "nobody"], "nobody"),
    ],
)
def test_a_run_that_has_measured_nothing_is_refused(
    job: str, measured: Path, capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main("plan", job, "--nodes", "4x8xA100", "--model", SIZES, *words, "--storage", str(measured)) != 0
    assert says in capfd.readouterr().err
