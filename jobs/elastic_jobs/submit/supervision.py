"""Attending a run over the Jobs API: its attempts' logs as one stream, its lost drivers replaced, its own exit code.

Ray neither retries a job nor gives it another driver. So whoever attends a run is also who notices that its driver is
lost, and submits the next attempt: the same command in the same package, with the next number. Several may attend: the
submission id is taken once, so one of them submits and the others follow what it has submitted. One attends always, in
the cluster itself (`elastic_jobs.submit.supervisor`). While nobody does, the controller trains on without a driver; an
attempt only carries `stop` to it and the run's end to the Jobs API.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from elastic.core.errors import RunNotFound
from elastic_jobs.submit import attempts
from elastic_jobs.submit.attempts import JobRecord, JobState, Outcome, Run, Verdict, judge
from elastic_jobs.submit.driver_command import DriverCommand, Mode
from elastic_jobs.submit.driver_protocol import LogReader
from elastic_jobs.submit.jobs_api import AlreadySubmitted, DriverNeeds, JobsApi, Submission, Unreachable

logger = logging.getLogger(__name__)

NEEDS_KEY = "elastic-driver"
# A head node that is being replaced is back within a few minutes.
_UNREACHABLE_S = 300.0
_PAUSE_S = 1.0
# How often a silent tail is doubted: it may stay open although the job has ended, or its node is frozen.
_ASK_S = 2.0
# How often the state is asked for where nobody reads the log.
_GLANCE_S = 3.0

T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Time, for tests to hold."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Attendant:
    """`show` gets every line of the log; `note` gets what is said about it. Without `show` a log is read only where an
    attempt's end cannot be judged without. With `stopping` every attempt that takes a lost driver's place stops the
    run, whoever sends it. `attempt` is the number of the one that was looked at last."""

    def __init__(
        self,
        api: JobsApi,
        show: Callable[[str], None] | None,
        note: Callable[[str], None],
        clock: Clock | None = None,
        stopping: bool = False,
    ) -> None:
        self._api = api
        self._stopping = stopping
        self._show = show
        self._note = note
        self._clock = clock or Clock()
        self.attempt = 0

    def find(self, name: str) -> Run:
        """By run id or submission id. Raises RunNotFound, and Unreachable when the server stays away."""
        return attempts.find(self._patiently(self._api.records), name)

    def attend(self, run: Run) -> Outcome:
        """From the run's newest attempt until the run is over. Raises Unreachable when the server stays away."""
        record = run.newest
        while True:
            outcome = self._one(record)
            if outcome.verdict is not Verdict.LOST:
                return outcome
            run = self._again(run.run_id)
            if run.newest.attempt == record.attempt:
                if run.crash_loop:
                    return replace(outcome, verdict=Verdict.FAILED, reason=_loop(outcome))
                self._note(f"attempt {record.attempt} is lost ({outcome.reason}); sending attempt {run.next_attempt}")
                self._patiently(partial(replace_driver, self._api, run, "stop" if self._stopping else None))
                run = self._again(run.run_id)
            record = run.newest
            if self._stopping:
                # Somebody else who attends was quicker, and knows nothing of the stop.
                self._patiently(partial(tell_to_stop, self._api, record))

    def _again(self, run_id: str) -> Run:
        """The run as the cluster knows it now. Raises RunNotFound where a head that was replaced has forgotten it."""
        try:
            return self.find(run_id)
        except RunNotFound as error:
            raise RunNotFound(
                f"the cluster no longer knows run {run_id!r}: its head was lost, and the job records with it; go on "
                f"with the run from storage by `elastic resume {run_id} --job JOB.yaml`"
            ) from error

    def _one(self, record: JobRecord) -> Outcome:
        """One attempt to its end."""
        log, self.attempt = LogReader(), record.attempt
        while True:
            # Asked before the log is read: of a job that had ended by then, what is read is the whole log.
            now = self._patiently(lambda: self._api.find(record.submission_id))
            if now is None:
                return Outcome(Verdict.LOST, reason="the cluster no longer knows the job")
            if self._show is not None or (now.state.ended and now.state is not JobState.SUCCEEDED):
                self._patiently(partial(self._read, log, record.submission_id, now.state.ended))
            if now.state.ended:
                self._tell(log.close())
                return judge(now, log.began, log.told)
            self._clock.sleep(_GLANCE_S if self._show is None else _PAUSE_S)

    def _read(self, log: LogReader, submission_id: str, ended: bool) -> None:
        """What is new in the log, until its tail ends; a tail that stays open after the job's end is left."""
        asked = self._clock.now()
        for piece in self._api.tail(submission_id, log.chars, ended):
            self._tell(log.feed(piece))
            now = self._clock.now()
            if not piece and (log.told is not None or now - asked > _ASK_S):
                asked = now
                found = self._patiently(lambda: self._api.find(submission_id))
                if found is None or found.state.ended:
                    return

    def _tell(self, lines: Sequence[str]) -> None:
        if self._show is not None:
            for line in lines:
                self._show(line)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """The answer, also over an absence of the server, within its limit."""
        limit, told = self._clock.now() + _UNREACHABLE_S, False
        while True:
            try:
                return ask()
            except Unreachable as error:
                if self._clock.now() > limit:
                    raise
                if not told:
                    self._note(f"{error}; the run may well go on, so this asks again")
                told = True
                self._clock.sleep(_PAUSE_S)


def replace_driver(api: JobsApi, run: Run, mode: Mode | None = None, max_steps: int | None = None) -> None:
    """Submits the run's next attempt, in the package and with the environment of the last one.

    Without a `mode` a run that was to be stopped is to be stopped still, also where that was said to the job before its
    driver could hear it, and any other goes on. Returns also when somebody else has submitted it. Raises PackageGone
    when the cluster no longer has the package.
    """
    last, number = run.newest, run.next_attempt
    before = DriverCommand.of_line(last.entrypoint)
    stopped = before.mode == "stop" or last.state is JobState.STOPPED
    command = replace(before, attempt=number, mode=mode or ("stop" if stopped else "continue"))
    command = command if max_steps is None else replace(command, max_steps=max_steps)
    submission = Submission(
        submission_id=attempts.submission_id(run.run_id, number),
        entrypoint=command.line(),
        metadata={**last.metadata, attempts.ATTEMPT_KEY: str(number)},
        needs=DriverNeeds.of_text(last.metadata.get(NEEDS_KEY)),
        runtime_env=last.runtime_env,
    )
    try:
        api.submit(submission)
    except AlreadySubmitted:
        logger.info("%s was submitted by somebody else", submission.submission_id)


def tell_to_stop(api: JobsApi, record: JobRecord) -> None:
    """Has the attempt end its run as planned, unless that is what it was sent for."""
    if DriverCommand.of_line(record.entrypoint).mode != "stop":
        api.stop(record.submission_id)


def _loop(outcome: Outcome) -> str:
    return (
        f"{attempts.SHORT_LIVES} drivers in a row were lost before they could do anything, each within "
        f"{attempts.SHORT_LIFE_S:.0f} s or for want of storage ({outcome.reason}); the run itself may go on without one"
    )
