"""`elastic submit` and `elastic resume` on a Jobs server in memory: what is sent, said and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from elastic_jobs import cli
from elastic_jobs.submit import attempts, driver_protocol
from elastic_jobs.submit.attempts import TAKEN_KEY, JobState
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.fake_jobs_api import GCS_PACKAGE
from elastic_jobs.submit.jobs_api import ClusterFacts, Submission, Unreachable
from jobs_server import ADDRESS, JOB, Backend, Server, elastic, submit, written_job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written_job(tmp_path, monkeypatch)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_what_goes_to_the_cluster(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(0)
    assert submit(server, job, "--env", "MODE=fast") == 0
    (sent,) = server.submissions
    assert sent.submission_id == "r-a1"
    assert DriverCommand.of_line(sent.entrypoint) == DriverCommand(
        "job.yaml", "r", 1, "new", "s3://bucket/runs", metadata.version("ray-elastic")
    )
    # The driver need not sit on the head, and takes no CPU that a slot could want.
    assert (sent.needs.cpus, sent.needs.memory_bytes) == (0.0, 500_000_000)
    # 60 s to save and leave, 300 s for storage, 30 s to say so.
    grace = {"RAY_JOB_STOP_WAIT_TIME_S": "390", "RAY_JOB_STOP_SIGNAL": "SIGTERM"}
    # Ray gets only what is on record anyway; the control store carries the rest.
    assert sent.runtime_env == {"env_vars": {"PLAIN": "yes", "MODE": "fast", **grace}}
    assert sent.variables == {"SUB_SECRET": "xyzzy"}
    assert sent.metadata[TAKEN_KEY] == "SUB_SECRET"
    assert "xyzzy" not in f"{sent}{sent.metadata}{sent.entrypoint}"
    out, err = capfd.readouterr()
    assert "xyzzy" not in out + err
    assert "sending 2 files" in err
    assert out.splitlines() == ["step 1/10"]
    assert "run r is finished" in err


def test_not_followed(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert submit(Server(), job, "--no-follow", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"run_id": "r", "submission_id": "r-a1", "address": ADDRESS}
    assert f"elastic logs r -f --address {ADDRESS}" in err


@pytest.mark.parametrize(
    ("change", "words", "code", "told"),
    [
        ("", ["--storage", "runs"], 2, "is inside the package"),
        ("", ["--env", "LD_PRELOAD"], 2, "LD_PRELOAD is read while a process starts"),
        ("", ["--storage", "s3://key:secret@bucket/runs"], 2, "holds credentials"),
        ("", ["--env", "NOT_THERE"], 2, "'NOT_THERE' should be sent to the job, but is not set here"),
        ("", ["--env", "HF_TOKEN=xyzzy"], 2, "give `--env HF_TOKEN` alone"),
        ("  pip: ['--extra-index-url https://me:xyzzy@host/simple', mine]\n", [], 2, "https://***@host/simple"),
        ("  py_modules: ['https://host/mine.zip?token=xyzzy']\n", [], 2, "mine.zip?token=***"),
        ("", ["--env", "1X=2"], 2, "not the name of an environment variable"),
        ("", ["--env", "RAY_JOB_STOP_SIGNAL=SIGINT"], 2, "is set from submit.stop_grace_s"),
        ("", ["--run-id", "../r"], 2, "run id"),
        ("  pipp: [x]\n", [], 2, "did you mean 'pip'?"),
        ("  working_dir: gone\n", [], 2, "is not a folder"),
        ("  exclude: ['*.py']\n", [], 2, "there is no file sub_train.py"),
        ("  exclude: [job.yaml]\n", [], 2, "is not in the package of"),
        ("  resources: {TPU: 1}\n", [], 105, "the driver wants TPU: 1, which no node has"),
        ("resources_per_worker: {CPU: 8}\n", [], 105, "CPU: 8, the largest node has CPU: 4"),
        ("  py_modules: [../lib]\n", [], 2, "put the folder '../lib' into working_dir"),
        ("  stop_grace_s: 0\n", [], 2, "stop_grace_s"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_sent(
    job: Path, capfd: pytest.CaptureFixture[str], change: str, words: list[str], code: int, told: str
) -> None:
    job.write_text(JOB + change)
    server = Server(0)
    assert submit(server, job, *words) == code
    assert server.submissions == []
    err = capfd.readouterr().err
    assert told in err
    assert "xyzzy" not in err
    assert err.count("\n") == 1


def test_a_secret_has_no_value_in_the_job_file(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job.write_text(JOB.replace("SUB_SECRET: ", "SUB_SECRET: xyzzy"))
    assert submit(Server(0), job) == 2
    assert "SUB_SECRET looks like a secret" in capfd.readouterr().err


def test_storage_must_be_named(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert elastic(Server(0), "submit", str(job)) == 2
    assert "name the run's storage" in capfd.readouterr().err


def test_another_ray_is_refused_and_an_autoscaler_is_trusted(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(0)
    server.facts = replace(server.facts, ray_version="2.9.3")
    assert submit(server, job) == 2
    assert "the cluster runs Ray 2.9.3" in capfd.readouterr().err
    server.facts = ClusterFacts(metadata.version("ray"), (), autoscaling=True)
    assert submit(server, job) == 0


@pytest.mark.parametrize(
    ("address", "told"), [("10.0.0.1:6379", "looks like http://"), ("http://u:p@head:8265", "must not hold a password")]
)
def test_addresses(address: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--address", address], Backend(Server())) == 2  # type: ignore[arg-type]
    assert told in capfd.readouterr().err


# -- two submissions ---------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_not_submitted_again(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    assert submit(server, job, "--no-follow") == 0
    assert submit(server, job, "--no-follow") == 2
    assert "is running as r-a1; follow it with `elastic logs r -f" in capfd.readouterr().err
    assert len(server.submissions) == 1


def test_of_two_at_once_one_is_refused(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    assert submit(server, job, "--no-follow") == 0
    server.records = lambda: ()  # type: ignore[method-assign]  # what the second has seen before the first was there
    assert submit(server, job, "--no-follow") == 2
    assert "just submitted by another client" in capfd.readouterr().err


def test_a_run_whose_submission_was_not_answered_can_be_found(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    take = server.submit

    def submit(submission: Submission) -> None:
        take(submission)
        raise Unreachable("no Ray Jobs server answers at http://head:8265 (timed out)")

    server.submit = submit  # type: ignore[method-assign]
    assert elastic(server, "submit", str(job), "--storage", "s3://bucket/runs") == 101
    run_id = attempts.merge(server.records())[0].run_id
    assert f"has accepted run '{run_id}' nevertheless: `elastic status {run_id}" in capfd.readouterr().err


def test_a_run_that_has_ended_is_resumed_and_not_submitted(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(104)
    assert submit(server, job) == 104
    assert submit(server, job) == 2
    assert "has ended there with exit code 104" in capfd.readouterr().err
    server.script = [0]
    assert elastic(server, "resume", "r", "--max-steps", "20") == 0
    assert [(one.attempt, one.mode, one.max_steps) for one in server.commands()] == [
        (1, "new", None),
        (2, "resume", 20),
    ]
    assert server.submissions[1].runtime_env["working_dir"] == GCS_PACKAGE


def test_a_submission_of_a_run_without_a_driver_gives_it_one(job: Path) -> None:
    server = Server()
    assert submit(server, job, "--no-follow") == 0
    server.say("r-a1", driver_protocol.began("r", 1, "started"))
    server.end("r-a1", JobState.FAILED, -9)
    server.script = [0]
    assert submit(server, job) == 0
    assert [(one.attempt, one.mode) for one in server.commands()] == [(1, "new"), (2, "continue")]


def test_resume_where_the_package_is_gone_and_on_a_new_cluster(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(103)
    assert submit(server, job) == 103
    server.packages.clear()
    assert elastic(server, "resume", "r") == 2
    assert "no longer has the package" in capfd.readouterr().err
    fresh = Server(0)
    assert elastic(fresh, "resume", "r") == 102
    assert "name its job file with --job" in capfd.readouterr().err
    assert elastic(fresh, "resume", "r", "--job", str(job), "--storage", "s3://bucket/runs") == 0
    assert [(one.attempt, one.mode) for one in fresh.commands()] == [(1, "resume")]
