"""Runs out of job records, what an ended attempt means, and the command that a driver is started with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_jobs.submit import attempts, driver_protocol
from elastic_jobs.submit.attempts import JobRecord, JobState, Verdict, judge
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.driver_protocol import LogReader

from elastic.core.errors import RunNotFound, UsageError


def record(run_id: str = "gpt", attempt: int = 1, state: JobState = JobState.RUNNING, **more: object) -> JobRecord:
    about = attempts.metadata(run_id, attempt, "s3://b/runs", "0.1.0")
    made = JobRecord(
        attempts.submission_id(run_id, attempt), state, run_id, attempt, started_at=100.0 * attempt, metadata=about
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_records_of_one_run_belong_together() -> None:
    other = JobRecord("raysubmit_1", JobState.RUNNING)
    runs = attempts.merge([record(attempt=2), other, record("old", started_at=1.0), record(attempt=10), record()])
    assert [run.run_id for run in runs] == ["gpt", "old"]
    assert [one.attempt for one in runs[0].attempts] == [1, 2, 10]
    assert (runs[0].next_attempt, runs[0].storage_url) == (11, "s3://b/runs")


def test_a_run_is_found_by_its_id_and_by_those_of_its_attempts() -> None:
    records = [record(), record(attempt=2), record("other")]
    assert attempts.find(records, "gpt") == attempts.find(records, "gpt-a1")
    with pytest.raises(RunNotFound, match="did you mean 'other'"):
        attempts.find(records, "othre")
    with pytest.raises(RunNotFound, match="no run was ever submitted"):
        attempts.find([], "gpt")


@pytest.mark.parametrize(
    "about",
    [None, {}, {"elastic-run": "gpt"}, {"elastic-attempt": "1"}, {"elastic-run": "gpt", "elastic-attempt": "-1"}],
)
def test_jobs_of_others_have_no_identity(about: dict[str, str] | None) -> None:
    assert attempts.identity(about) == (None, 0)


_COMMAND = {"error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}


@pytest.mark.parametrize(
    ("state", "more", "began", "told", "verdict", "code"),
    [
        (JobState.PENDING, {}, False, None, Verdict.RUNNING, 101),
        (JobState.RUNNING, {}, True, {"exit_code": 0}, Verdict.RUNNING, 101),
        (JobState.SUCCEEDED, {"exit_code": 0}, True, None, Verdict.OVER, 0),
        (JobState.FAILED, {"exit_code": 104, **_COMMAND}, True, None, Verdict.OVER, 104),
        (JobState.FAILED, {"exit_code": 2, **_COMMAND}, False, None, Verdict.OVER, 2),
        # A stopped job has no exit code; its driver's last words have.
        (JobState.STOPPED, {}, True, {"exit_code": 103}, Verdict.OVER, 103),
        (JobState.STOPPED, {}, True, {"exit_code": 0}, Verdict.OVER, 0),
        (JobState.STOPPED, {}, True, {"exit_code": 77}, Verdict.OVER, 101),
        (JobState.STOPPED, {}, True, {"exit_code": True}, Verdict.OVER, 101),
        (JobState.STOPPED, {}, False, None, Verdict.OVER, 103),
        # Killed when the grace period was over.
        (JobState.STOPPED, {}, True, None, Verdict.FAILED, 101),
        (JobState.FAILED, {"exit_code": -9, **_COMMAND}, True, None, Verdict.LOST, 101),
        (JobState.FAILED, {"exit_code": 137, **_COMMAND}, True, None, Verdict.LOST, 101),
        (JobState.FAILED, {"exit_code": 75, **_COMMAND}, True, None, Verdict.LOST, 101),
        (JobState.FAILED, {"error_type": "JOB_SUPERVISOR_ACTOR_DIED"}, False, None, Verdict.LOST, 101),
        # Away from the head that was replaced with its Jobs server, or with it.
        (JobState.FAILED, {"error_type": "JOB_SUPERVISOR_ACTOR_START_FAILURE", "node": "a1"}, False, None,
         Verdict.LOST, 101),
        (JobState.FAILED, {"error_type": "JOB_SUPERVISOR_ACTOR_START_FAILURE"}, False, None, Verdict.FAILED, 101),
        # A later attempt whose driver could not hear the stop yet: the run may continue.
        (JobState.STOPPED, {"attempt": 2}, False, None, Verdict.LOST, 101),
        (JobState.STOPPED, {"attempt": 2}, False, {"exit_code": 103}, Verdict.OVER, 103),
        (JobState.FAILED, {"exit_code": 69, **_COMMAND}, False, None, Verdict.LOST, 101),
        # Killed before it could say that it has reached its run, which may continue.
        (JobState.FAILED, {"exit_code": -9, **_COMMAND}, False, None, Verdict.LOST, 101),
        # Whoever did not begin would not begin the next time.
        (JobState.FAILED, {"exit_code": 1, **_COMMAND}, False, None, Verdict.FAILED, 101),
        (JobState.FAILED, {"error_type": "RUNTIME_ENV_SETUP_FAILURE"}, False, None, Verdict.FAILED, 101),
        (JobState.FAILED, {"error_type": "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"}, False, None, Verdict.FAILED, 105),
        (JobState.FAILED, {"error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"}, False, None, Verdict.FAILED, 105),
    ],
)  # fmt: skip
def test_what_an_attempt_came_to(
    state: JobState, more: dict[str, object], began: bool, told: dict[str, object] | None, verdict: Verdict, code: int
) -> None:
    outcome = judge(record(state=state, message="first line\nthe cause\n", **more), began, told)
    assert (outcome.verdict, outcome.exit_code) == (verdict, code)
    # Zero is said of a run that reached its end, and of nothing else.
    assert outcome.exit_code != 0 or outcome.verdict is Verdict.OVER
    if verdict in (Verdict.LOST, Verdict.FAILED):
        assert outcome.reason


def test_three_short_lives_in_a_row_are_a_crash_loop() -> None:
    lost: dict[str, object] = {"state": JobState.FAILED, "exit_code": -9}
    short = [record(attempt=n, ended_at=100.0 * n + 5, **lost) for n in (1, 2, 3)]
    long = [replace(one, ended_at=one.started_at + 90) for one in short if one.started_at is not None]
    assert attempts.Run("gpt", tuple(short)).crash_loop
    assert not attempts.Run("gpt", tuple(short[:2])).crash_loop
    assert not attempts.Run("gpt", (*short[:2], long[2])).crash_loop
    assert attempts.Run("gpt", (long[0], *short)).crash_loop
    # Storage that does not answer takes longer, and leaves as little done.
    assert attempts.Run("gpt", (short[0], replace(long[1], exit_code=69), short[2])).crash_loop
    # Stopped and continued with, or at an end of another kind: none of these is a driver that was lost.
    assert not attempts.Run("gpt", (short[0], replace(short[1], state=JobState.STOPPED), short[2])).crash_loop
    assert not attempts.Run("gpt", (short[0], replace(short[1], exit_code=104), short[2])).crash_loop


def test_values_of_the_environment_are_not_shown() -> None:
    one = record(runtime_env={"env_vars": {"TOKEN": "xyzzy"}, "pip": ["a"]})
    assert one.redacted()["runtime_env"] == {"env_vars": {"TOKEN": "<redacted>"}, "pip": ["a"]}
    assert "xyzzy" not in f"{one} {one.redacted()}"


def test_a_driver_command_survives_its_way() -> None:
    command = DriverCommand("sub dir/job.yaml", "gpt", 3, "resume", "s3://b/it's mine", "0.1.0", 40)
    assert DriverCommand.of_line(command.line()) == command
    assert command.line().startswith("exec python -m elastic_jobs.submit.driver 'sub dir/job.yaml' --run-id gpt")
    with pytest.raises(UsageError, match="not a driver of ray-elastic"):
        DriverCommand.of_line("python train.py")
    with pytest.raises(UsageError, match="does not understand"):
        DriverCommand.of_words(["job.yaml", "--run-id", "gpt", "--new-option"])
    with pytest.raises(UsageError, match="run id"):
        DriverCommand.of_words(["j", "--run-id", "../x", "--storage", "/r", "--client-version", "1"])


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
def test_a_log_is_read_in_pieces(cut: int) -> None:
    text = "hello\n" + driver_protocol.began("gpt", 1, "started") + "\nstep 3\n"
    text += driver_protocol.ended("gpt", "stopped", 103, 3, "asked") + "\nelastic-driver: {broken\nlast"
    log, shown = LogReader(), []
    for start in range(0, len(text), cut):
        shown += log.feed(text[start : start + cut])
    assert (log.began, log.chars) == (True, len(text))
    assert log.told is not None
    assert (log.told["status"], log.told["exit_code"], log.told["step"]) == ("stopped", 103, 3)
    assert [*shown, *log.close()] == ["hello", "step 3", "elastic-driver: {broken", "last"]
