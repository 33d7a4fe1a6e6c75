"""Following a submitted run: lost drivers are replaced, and a server that is away is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_jobs.submit import attempts, driver_protocol
from elastic_jobs.submit.attempts import JobState, Outcome, Verdict
from elastic_jobs.submit.jobs_api import JobsApi, Unreachable
from elastic_jobs.submit.supervision import Clock, Supervision, replace_driver
from jobs_server import Server, elastic, started, submit, written_job

from elastic.core.errors import RunNotFound
from elastic.runtime.handed_environment import VARIABLE


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written_job(tmp_path, monkeypatch)


def test_lost_drivers_are_replaced_by_whoever_follows(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Server(None, 75, 104)
    server.script[1] = None
    assert submit(server, job) == 104
    assert [(one.attempt, one.mode) for one in server.commands()] == [(1, "new"), (2, "continue"), (3, "continue")]
    assert [sent.needs for sent in server.submissions] == [server.submissions[0].needs] * 3
    # Each attempt finds the environment of the first one.
    (name,) = server.handed
    assert server.handed[name] == {"SUB_SECRET": "xyzzy"}
    assert [sent.runtime_env["env_vars"][VARIABLE] for sent in server.submissions[1:]] == [name] * 2
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
    assert "could not read the state of the run in storage" in capfd.readouterr().err


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
