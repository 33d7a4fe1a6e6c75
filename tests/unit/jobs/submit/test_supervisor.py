"""The supervisor inside the cluster: lost drivers are replaced, few requests are made, and it ends for certain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_jobs.submit import attempts, driver_protocol, supervisor_actor
from elastic_jobs.submit.attempts import JobState
from elastic_jobs.submit.driver_command import DriverCommand
from elastic_jobs.submit.fake_jobs_api import FakeJobsApi
from elastic_jobs.submit.jobs_api import DriverNeeds, JobsApi, Submission, Unreachable
from elastic_jobs.submit.supervision import Clock
from elastic_jobs.submit.supervisor import Supervisor
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from elastic.core.errors import RunNotFound, UsageError

FIRST = DriverCommand("job.yaml", "r", 1, "new", "/runs", "0.1.0")


class Server(FakeJobsApi):
    """Counts what is asked of it. A log is read of an attempt that has ended, never of one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.submit(
            Submission("r-a1", FIRST.line(), attempts.metadata("r", 1, "/runs", "0.1.0"), DriverNeeds(), {"pip": ["x"]})
        )
        self.began(1)

    def began(self, attempt: int) -> None:
        self.say(f"r-a{attempt}", driver_protocol.began("r", attempt, "started"))

    def lose(self, attempt: int, after_s: float = 100.0) -> None:
        self.end(f"r-a{attempt}", JobState.FAILED, -9, after_s=after_s)

    def modes(self) -> list[tuple[int, str]]:
        commands = (DriverCommand.of_line(one.entrypoint) for one in self.submissions)
        return [(command.attempt, command.mode) for command in commands]

    def find(self, submission_id: str) -> attempts.JobRecord | None:
        self.asked += 1
        return super().find(submission_id)

    def tail(self, submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
        assert ended, "nobody reads this log"
        return super().tail(submission_id, skip_chars, ended)


class World:
    """A clock that only sleeping moves; at the named seconds something happens."""

    def __init__(self, **at: Callable[[], object]) -> None:
        self.s = 0.0
        self._plan = sorted((int(name.removeprefix("s")), happen) for name, happen in at.items())

    def sleep(self, seconds: float) -> None:
        self.s += seconds
        while self._plan and self._plan[0][0] <= self.s:
            self._plan.pop(0)[1]()

    def supervisor(self, server: JobsApi, goes_on: Callable[[], bool] = lambda: True) -> Supervisor:
        return Supervisor("r", lambda: server, goes_on, Clock(lambda: self.s, self.sleep))


def test_a_lost_driver_is_replaced_and_little_is_asked_meanwhile() -> None:
    server = Server()
    world = World(
        s3600=lambda: server.lose(1),
        s3700=lambda: server.began(2),
        s7200=lambda: server.end("r-a2", JobState.SUCCEEDED, 0),
    )
    world.supervisor(server).keep()
    assert server.modes() == [(1, "new"), (2, "continue")]
    assert server.submissions[1].runtime_env["pip"] == ["x"]
    assert 7200 <= world.s < 7210
    assert server.asked < 7200 / 2.5


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        (JobState.FAILED, 104, None),
        (JobState.FAILED, 2, None),
        (JobState.STOPPED, None, driver_protocol.ended("r", "stopped", 103, 7, "asked")),
        # Killed when its grace period was over: the controller continues stopping.
        (JobState.STOPPED, None, None),
        # Whoever cannot begin could not the next time either.
        (JobState.FAILED, 105, None),
    ],
)
def test_it_ends_with_its_run(state: JobState, code: int | None, words: str | None) -> None:
    server = Server()
    if words is not None:
        server.say("r-a1", words)
    world = World(s100=lambda: server.end("r-a1", state, code))
    supervisor = world.supervisor(server)
    supervisor.keep()
    assert server.modes() == [(1, "new")]
    assert not supervisor.ask(2), "who asks now must ask for another"


def test_a_crash_loop_of_drivers_is_left() -> None:
    server = Server()
    server.play = lambda sent: server.lose(attempts.identity(sent.metadata)[1], after_s=3.0)
    server.lose(1, after_s=3.0)
    World().supervisor(server).keep()
    assert [attempt for attempt, _ in server.modes()] == [1, 2, 3]


def test_a_stop_that_came_before_a_driver_could_hear_it_reaches_the_run_all_the_same() -> None:
    server = Server()
    world = World(
        s10=lambda: server.lose(1),
        s30=lambda: server.end("r-a2", JobState.STOPPED),
        s60=lambda: server.end("r-a3", JobState.FAILED, 103),
    )
    world.supervisor(server).keep()
    assert server.modes() == [(1, "new"), (2, "continue"), (3, "stop")]


def test_a_server_that_stays_away_is_waited_for_as_long_as_the_run_has_a_controller() -> None:
    class Away(Server):
        def find(self, submission_id: str) -> attempts.JobRecord | None:
            if world.s < back_s:
                raise Unreachable("no Ray Jobs server answers at http://127.0.0.1:8265")
            return super().find(submission_id)

    server, world, back_s = Away(), World(), 2000.0
    server.end("r-a1", JobState.SUCCEEDED, 0)
    world.supervisor(server).keep()
    assert world.s >= back_s

    world, lives = World(s1000=lambda: lives.clear()), [True]
    with pytest.raises(Unreachable):
        world.supervisor(server, lambda: bool(lives)).keep()
    assert world.s < 2000


def test_a_server_that_is_not_there_yet_is_asked_for_again() -> None:
    server, world, tries = Server(), World(), list[int]()
    server.end("r-a1", JobState.SUCCEEDED, 0)

    def open_api() -> JobsApi:
        tries.append(1)
        if len(tries) < 3:
            raise Unreachable("the cluster's Jobs server has not published its address yet")
        return server

    Supervisor("r", open_api, lambda: True, Clock(lambda: world.s, world.sleep)).keep()
    assert len(tries) == 3


def test_a_supervisor_that_accepts_a_newer_attempt_supervises_it() -> None:
    class Late(Server):
        newest = 1

        def records(self) -> tuple[attempts.JobRecord, ...]:
            return tuple(record for record in super().records() if record.attempt <= self.newest)

    server, answers = Late(), list[bool]()

    def resumed() -> None:
        server.end("r-a1", JobState.FAILED, 104)
        about = attempts.metadata("r", 2, "/runs", "0.1.0")
        server.submit(Submission("r-a2", FIRST.line(), about, DriverNeeds(), {}))
        # Its driver asks, and the list in which the end is looked for does not have it yet.
        answers.append(supervisor.ask(2))

    world = World(
        s10=resumed,
        s30=lambda: setattr(server, "newest", 2),
        s100=lambda: server.end("r-a2", JobState.SUCCEEDED, 0),
    )
    supervisor = world.supervisor(server)
    supervisor.keep()
    assert answers == [True]
    assert world.s >= 100


def test_what_cannot_be_mended_here_ends_it() -> None:
    server = Server()
    server._records.clear()
    with pytest.raises(RunNotFound):
        World().supervisor(server).keep()
    server = Server()
    server.lose(1)
    server.packages.clear()
    supervisor = World().supervisor(server)
    with pytest.raises(UsageError, match="package"):
        supervisor.keep()
    assert not supervisor.ask(1)


# -- a driver's side of it ---------------------------------------------------------------------------------------------


class Asked(supervisor_actor.RaySupervisor):
    """`answers` are what the actor says, one after the other; every ask is one that was made or found for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: bool | RayError | None) -> None:
        super().__init__("r", 3)
        self.answers, self.asks, self.s = list(answers), 0, 1000.0
        monkeypatch.setattr(supervisor_actor, "time", SimpleNamespace(monotonic=lambda: self.s))
        monkeypatch.setattr(supervisor_actor.ray, "wait", self._wait)
        monkeypatch.setattr(supervisor_actor.ray, "get", self._get)

    def _actor(self) -> Any:
        self.asks += 1
        return SimpleNamespace(ask=SimpleNamespace(remote=lambda attempt: attempt))

    def _wait(self, refs: list[int], timeout: float) -> tuple[list[int], list[int]]:
        """Without an answer yet: None."""
        assert (refs, timeout) == ([3], 0)
        return ([], refs) if self.answers[0] is None and self.answers.pop(0) is None else (refs, [])

    def _get(self, ref: int) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, RayError):
            raise answer
        assert answer is not None
        return answer

    def look_for(self, seconds: float) -> None:
        until = self.s + seconds
        while self.s < until:
            self.ensure()
            self.s += 0.5


def test_a_driver_asks_until_a_supervisor_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, None, None, False, RayActorError(), None, True)
    asked.look_for(60.0)
    assert (asked.asks, asked.answers) == (3, [])


def test_a_supervisor_that_cannot_be_started_is_not_retried_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Asked(monkeypatch, *[RayActorError(error_msg="no module named 'jobs'")] * 100)
    with caplog.at_level(logging.WARNING):
        asked.look_for(600.0)
    assert asked.asks == 5
    (told,) = [record.getMessage() for record in caplog.records]
    assert "no supervisor for run r, so a lost driver will not be replaced: " in told
    # A head that is being replaced is none of those.
    away = ActorUnavailableError("the actor is restarting", None)
    asked = Asked(monkeypatch, *[away] * 30, True)
    asked.look_for(600.0)
    assert asked.asks == 31
