"""`elastic stop`, `status`, `logs` and `list` of submitted runs, on a Jobs server in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs.submit import attempts, driver_protocol
from elastic_jobs.submit.attempts import JobState
from elastic_jobs.submit.jobs_api import Submission
from elastic_jobs.submit.supervision import replace_driver
from jobs_server import ADDRESS, Server, elastic, started, submit, written_job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written_job(tmp_path, monkeypatch)


def test_stop(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = started(job, Server())
    assert elastic(server, "stop", "r", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out.splitlines()[-1]) == {
        "run_id": "r", "status": "stopped", "exit_code": 103, "reason": "the job was stopped",
    }  # fmt: skip
    assert f"elastic resume r --address {ADDRESS}" in err
    assert elastic(server, "stop", "r") == 102
    assert elastic(server, "stop", "nope") == 102


def test_stop_of_a_run_without_a_driver_sends_one_to_stop_it(job: Path) -> None:
    server = started(job, Server())
    server.end("r-a1", JobState.FAILED, -9)
    server.script = [103]
    assert elastic(server, "stop", "r") == 0
    assert server.commands()[-1].mode == "stop"


def test_a_stop_outlives_the_driver_that_was_told(job: Path) -> None:
    server = started(job, Server())
    server.on_stop = lambda name: server.end(name, JobState.FAILED, error_type="JOB_SUPERVISOR_ACTOR_DIED")
    server.script = [None, 103]
    assert elastic(server, "stop", "r") == 0
    assert [one.mode for one in server.commands()] == ["new", "stop", "stop"]
    # Nor does somebody else who follows make a run continue that is to be stopped.
    server.end("r-a3", JobState.FAILED, -9)
    replace_driver(server, attempts.find(server.records(), "r"))
    assert server.commands()[-1].mode == "stop"


def test_a_driver_that_another_follower_sent_is_stopped_too(job: Path) -> None:
    server = started(job, Server())

    def lost(name: str) -> None:
        server.end(name, JobState.FAILED, -9)
        server.on_stop = server._stop
        replace_driver(server, attempts.find(server.records(), "r"))
        server.say("r-a2", driver_protocol.began("r", 2, "attached"))

    server.on_stop = lost
    assert elastic(server, "stop", "r") == 0
    assert [one.mode for one in server.commands()] == ["new", "continue"]


@pytest.mark.parametrize("words", [[], ["--no-wait"]])
def test_a_driver_that_was_sent_at_the_instant_of_the_stop_is_told_too(job: Path, words: list[str]) -> None:
    server = started(job, Server())
    server.end("r-a1", JobState.FAILED, -9)
    take, stopped = server.submit, list[str]()

    def too_late(submission: Submission) -> None:
        server.submit = take  # type: ignore[method-assign]
        replace_driver(server, attempts.find(server.records(), "r"))
        server.say("r-a2", driver_protocol.began("r", 2, "attached"))
        take(submission)

    def stop(name: str) -> None:
        stopped.append(name)
        server._stop(name)

    server.submit, server.on_stop = too_late, stop  # type: ignore[method-assign]
    assert elastic(server, "stop", "r", *words) == 0
    assert [one.mode for one in server.commands()] == ["new", "continue"]
    assert stopped == ["r-a2"]


def test_a_stop_that_ran_out_of_time_is_no_success(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = started(job, Server())
    server.on_stop = lambda name: server.end(name, JobState.STOPPED)
    assert elastic(server, "stop", "r") == 101
    assert "grace period was over" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["status", "logs"])
def test_status_and_logs_have_the_exit_code_of_the_run(
    job: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server = started(job, Server())
    assert elastic(server, command, "r") == 101
    assert elastic(server, command, "nope") == 102
    server.end("r-a1", JobState.FAILED, 106)
    assert elastic(server, command, "r-a1") == 106
    server = Server(0)
    assert submit(server, job) == 0
    capfd.readouterr()
    assert elastic(server, command, "r", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["status"] == "finished"
    assert "xyzzy" not in out + err


def test_list(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = started(job, Server())
    capfd.readouterr()
    assert elastic(server, "list") == 0
    out = capfd.readouterr().out
    assert out.splitlines()[1].split()[:4] == ["r", "running", "1", "-"]
    assert elastic(server, "list", "--json") == 0
    listed: Mapping[str, Any] = json.loads(capfd.readouterr().out)
    assert listed["newest"]["runtime_env"]["env_vars"]["SUB_SECRET"] == "<redacted>"
    assert elastic(Server(), "list") == 0
    assert "elastic submit" in capfd.readouterr().err
