"""A Jobs server in memory whose drivers follow a script, and the command line on it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from elastic_jobs import cli
from elastic_jobs.submit import driver_protocol
from elastic_jobs.submit.attempts import JobState
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.fake_jobs_api import FakeJobsApi
from elastic_jobs.submit.jobs_api import ClusterFacts, JobsApi, Submission

ADDRESS = "http://head:8265"
JOB = """
entry_point: sub_train.py:main
min_workers: 1
max_workers: 2
max_steps: 10
submit:
  env_vars: {PLAIN: "yes", SUB_SECRET: }
"""


class Server(FakeJobsApi):
    """Drivers that follow `script`: one exit code per attempt, or None for SIGKILL."""

    def __init__(self, *script: int | None) -> None:
        super().__init__(ClusterFacts(metadata.version("ray"), ({"CPU": 4.0, "memory": 1e10},)))
        self.script = list(script)
        self.play = self._play
        self.on_stop = self._stop

    def _play(self, submission: Submission) -> None:
        if not self.script:
            return
        command, code = DriverCommand.of_line(submission.entrypoint), self.script.pop(0)
        self.say(
            submission.submission_id, driver_protocol.began(command.run_id, command.attempt, "started"), "step 1/10"
        )
        if code is None:
            self.end(submission.submission_id, JobState.FAILED, -9)
            return
        self.say(submission.submission_id, driver_protocol.ended(command.run_id, "x", code, 10, "so it is"))
        self.end(submission.submission_id, JobState.FAILED if code else JobState.SUCCEEDED, code)

    def _stop(self, submission_id: str) -> None:
        self.say(submission_id, driver_protocol.ended("r", "stopped", 103, 7, "the job was stopped"))
        self.end(submission_id, JobState.STOPPED)

    def commands(self) -> list[DriverCommand]:
        return [DriverCommand.of_line(submission.entrypoint) for submission in self.submissions]


class Backend:
    def __init__(self, api: JobsApi) -> None:
        self.api, self.addresses = api, list[str]()

    def jobs_api(self, address: str) -> JobsApi:
        self.addresses.append(address)
        return self.api


def elastic(api: JobsApi, *words: str) -> int:
    return cli.main([*words, "--address", ADDRESS], Backend(api))  # type: ignore[arg-type]


def written_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file in the working directory, and the secret that it takes from the environment."""
    monkeypatch.setenv("SUB_SECRET", "xyzzy")
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    monkeypatch.setattr("elastic_jobs.submit.supervision._PAUSE_S", 0.0)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "sub_train.py").write_text("def main(config): ...\n")
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def submit(api: JobsApi, job: Path, *more: str) -> int:
    return elastic(api, "submit", str(job), "--run-id", "r", "--storage", "s3://bucket/runs", *more)


def started(job: Path, server: Server) -> Server:
    assert submit(server, job, "--no-follow") == 0
    server.say("r-a1", driver_protocol.began("r", 1, "started"), "one")
    return server
