"""`elastic submit|list|status|logs|stop|resume` on a Jobs server of the imagination: what is sent, said and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs import cli
from elastic_jobs.submit import attempts, driver_protocol
from elastic_jobs.submit.attempts import JobState, Outcome, Verdict
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.fake_jobs_api import GCS_PACKAGE, FakeJobsApi
from elastic_jobs.submit.jobs_api import ClusterFacts, JobsApi, Submission, Unreachable
from elastic_jobs.submit.supervision import Clock, Supervision, replace_driver

from elastic.core.errors import RunNotFound

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
    """Drivers that do as they are told by `script`: one (exit code or None for SIGKILL) per attempt."""

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


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    assert sent.runtime_env == {"env_vars": {"PLAIN": "yes", "SUB_SECRET": "xyzzy", "MODE": "fast", **grace}}
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
        ("", ["--storage", "runs"], 2, "lies in what is sent"),
        ("", ["--storage", "s3://key:secret@bucket/runs"], 2, "holds credentials"),
        ("", ["--env", "NOT_THERE"], 2, "'NOT_THERE' should be sent to the job, but is not set here"),
        ("", ["--env", "HF_TOKEN=xyzzy"], 2, "write `--env HF_TOKEN` alone"),
        ("  pip: ['--extra-index-url https://me:xyzzy@host/simple', mine]\n", [], 2, "https://***@host/simple"),
        ("  py_modules: ['https://host/mine.zip?token=xyzzy']\n", [], 2, "mine.zip?token=***"),
        ("", ["--env", "1X=2"], 2, "no name of an environment variable"),
        ("", ["--env", "RAY_JOB_STOP_SIGNAL=SIGINT"], 2, "is set from submit.stop_grace_s"),
        ("", ["--run-id", "../r"], 2, "run id"),
        ("  pipp: [x]\n", [], 2, "did you mean 'pip'?"),
        ("  working_dir: gone\n", [], 2, "is not a folder"),
        ("  exclude: ['*.py']\n", [], 2, "there is no file sub_train.py"),
        ("  exclude: [job.yaml]\n", [], 2, "is not in what"),
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
    assert "say where the run is kept" in capfd.readouterr().err


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
    assert "submitted by somebody else just now" in capfd.readouterr().err


def test_a_run_whose_submission_was_not_answered_can_be_found(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    take = server.submit

    def submit(submission: Submission) -> None:
        take(submission)
        raise Unreachable("no Ray Jobs server answers at http://head:8265 (timed out)")

    server.submit = submit  # type: ignore[method-assign]
    assert elastic(server, "submit", str(job), "--storage", "s3://bucket/runs") == 101
    run_id = attempts.merge(server.records())[0].run_id
    assert f"has taken run '{run_id}' all the same says `elastic status {run_id}" in capfd.readouterr().err


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


# -- following ---------------------------------------------------------------------------------------------------------


def test_lost_drivers_are_replaced_by_whoever_follows(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(None, 75, 104)
    server.script[1] = None
    assert submit(server, job) == 104
    assert [(one.attempt, one.mode) for one in server.commands()] == [(1, "new"), (2, "continue"), (3, "continue")]
    assert [sent.needs for sent in server.submissions] == [server.submissions[0].needs] * 3
    assert [sent.runtime_env["env_vars"]["SUB_SECRET"] for sent in server.submissions] == ["xyzzy"] * 3
    out, err = capfd.readouterr()
    assert out.splitlines() == ["step 1/10"] * 3
    assert "attempt 1 is lost (its driver was killed by signal 9); sending attempt 2" in err
    assert "xyzzy" not in out + err


def test_a_driver_that_never_began_is_not_replaced(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    server.play = lambda sent: server.end(
        sent.submission_id, JobState.FAILED, 1, message="...\nNo module named 'jobs'\n"
    )
    assert submit(server, job) == 101
    assert "the driver did not start: No module named 'jobs'" in capfd.readouterr().err


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.s = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.s += max(seconds, 1.0)


def supervise(server: JobsApi, time: Time, shown: list[str], said: list[str]) -> Outcome:
    return Supervision(server, shown.append, said.append, time.clock()).supervise(attempts.find(server.records(), "r"))


def started(job: Path, server: Server) -> Server:
    assert submit(server, job, "--no-follow") == 0
    server.say("r-a1", driver_protocol.began("r", 1, "started"), "one")
    return server


def test_a_tail_that_ends_while_the_job_runs_is_taken_up_again(job: Path) -> None:
    server, shown = started(job, Server()), list[str]()
    more = iter(["two", "three"])

    def on_idle(name: str) -> None:
        word = next(more, None)
        if word is None:
            server.say(name, "last", driver_protocol.ended("r", "finished", 0, 10, ""))
            server.end(name, JobState.SUCCEEDED, 0)
        else:
            server.say(name, word)

    server.on_idle = on_idle
    assert supervise(server, Time(), shown, []) == Outcome(Verdict.OVER, 0)
    assert shown == ["one", "two", "three", "last"]


def test_a_tail_that_stays_open_after_the_end_is_left(job: Path) -> None:
    server, time, shown = started(job, Server()), Time(), list[str]()

    class Silent(Server):
        def tail(self, submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
            if ended:
                return
            yield "one\n"[skip_chars:]
            while True:
                time.sleep(1.0)
                if time.s > 20:
                    server.end("r-a1", JobState.FAILED, 106)
                yield ""

    silent = Silent()
    silent._records, silent._logs = server._records, server._logs
    assert supervise(silent, time, shown, []).exit_code == 106
    assert (shown, time.s < 60) == (["one"], True)


def test_a_server_that_is_away_is_waited_for_within_a_limit(job: Path) -> None:
    server, time, said = started(job, Server()), Time(), list[str]()
    real, back_at = server.find, 100.0

    def find(name: str) -> Any:
        if time.s < back_at:
            raise Unreachable("no Ray Jobs server answers at http://head:8265")
        server.end(name, JobState.FAILED, 104)
        return real(name)

    server.find = find  # type: ignore[method-assign]
    assert supervise(server, time, [], said).exit_code == 104
    assert len(said) == 1
    back_at = time.s + 1e9
    with pytest.raises(Unreachable):
        supervise(server, time, [], said)


def test_a_server_that_is_away_when_somebody_begins_to_follow_is_waited_for(job: Path) -> None:
    server = started(job, Server())
    real, asked = server.records, list[int]()

    def records() -> Any:
        asked.append(1)
        if len(asked) < 3:
            raise Unreachable("no Ray Jobs server answers at http://head:8265")
        return real()

    server.records = records  # type: ignore[method-assign]
    server.on_idle = server._stop
    assert elastic(server, "logs", "r", "-f") == 103


def test_three_drivers_lost_at_once_are_the_last(job: Path) -> None:
    server = Server()
    server.play = lambda sent: server.end(
        sent.submission_id, JobState.FAILED, error_type="JOB_SUPERVISOR_ACTOR_DIED", after_s=2
    )
    assert submit(server, job) == 101
    assert len(server.submissions) == 3


def test_drivers_whose_storage_is_away_are_not_sent_for_ever(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server()
    server.play = lambda sent: server.end(sent.submission_id, JobState.FAILED, 69, after_s=300)
    assert submit(server, job) == 101
    assert len(server.submissions) == 3
    assert "could not read in storage how the run goes" in capfd.readouterr().err


def test_two_who_follow_send_one_attempt(job: Path) -> None:
    server = started(job, Server())
    server.end("r-a1", JobState.FAILED, -9)
    run = attempts.find(server.records(), "r")
    replace_driver(server, run)
    replace_driver(server, run)
    assert [sent.submission_id for sent in server.submissions] == ["r-a1", "r-a2"]


def test_a_cluster_that_has_forgotten_the_run(job: Path) -> None:
    server = started(job, Server())
    run = attempts.find(server.records(), "r")
    server._records.clear()
    with pytest.raises(RunNotFound, match=r"continue the run from storage with `elastic resume r --job JOB.yaml`"):
        Supervision(server, print, print, Time().clock()).supervise(run)


def test_the_last_words_are_waited_for_while_the_server_is_away(job: Path) -> None:
    server, time, said = started(job, Server()), Time(), list[str]()
    whole = server.tail

    def tail(submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
        if ended and time.s < 50:
            raise Unreachable("no Ray Jobs server answers at http://head:8265")
        return whole(submission_id, skip_chars, ended)

    server.tail = tail  # type: ignore[method-assign]
    server.on_idle = server._stop
    assert supervise(server, time, [], said) == Outcome(Verdict.OVER, 103, "the job was stopped")
    assert len(said) == 1


# -- the other commands ------------------------------------------------------------------------------------------------


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
