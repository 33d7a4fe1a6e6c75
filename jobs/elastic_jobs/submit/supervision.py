"""Supervision of a run over the Jobs API: one log stream for all attempts, lost drivers replaced, the run's exit code.

Ray neither retries a job nor replaces its driver. A supervisor detects that a driver is lost and submits the next
attempt: the same command in the same package, with the next number. Several processes may supervise one run: Ray
accepts a submission id once, so one of them submits and the others follow its attempt. One supervisor always runs in
the cluster itself (`elastic_jobs.submit.supervisor`). Without any, the controller keeps training without a driver; an
attempt only carries `stop` to the controller, and the end of the run to the Jobs API.
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
# A head node that is being replaced returns within a few minutes.
_UNREACHABLE_S = 300.0
_PAUSE_S = 1.0
# How often to check the job behind a silent tail: it may stay open although the job has ended or its node is frozen.
_ASK_S = 2.0
# How often to poll the job state when nobody reads the log.
_GLANCE_S = 3.0

T = TypeVar("T")


@dataclass(frozen=True)
class Clock:
    """Time; tests pass a fake."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Supervision:
    """`show` receives every log line, `note` every remark about the run. Without `show`, logs are read only where the
    result of an attempt depends on them. With `stopping`, every replacement of a lost driver stops the run, whoever
    submits it. `attempt` is the number of the attempt examined last."""

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
        """By run id or submission id. Raises RunNotFound, and Unreachable when the server stays unreachable."""
        return attempts.find(self._patiently(self._api.records), name)

    def supervise(self, run: Run) -> Outcome:
        """From the newest attempt until the run is over. Raises Unreachable when the server stays unreachable."""
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
                # Another supervisor may have submitted this attempt without knowing about the stop.
                self._patiently(partial(tell_to_stop, self._api, record))

    def _again(self, run_id: str) -> Run:
        """The run as the cluster knows it now. Raises RunNotFound if a replaced head has lost the job records."""
        try:
            return self.find(run_id)
        except RunNotFound as error:
            raise RunNotFound(
                f"the cluster no longer knows run {run_id!r}: its head was lost, and the job records with it; continue "
                f"the run from storage with `elastic resume {run_id} --job JOB.yaml`"
            ) from error

    def _one(self, record: JobRecord) -> Outcome:
        """Follow one attempt to its end."""
        log, self.attempt = LogReader(), record.attempt
        while True:
            # Query the state before the log: if the job has ended by then, the log that is read is complete.
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
        """Show new log text until the tail ends. A tail that stays open after the end of the job is dropped."""
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
        """The answer; retries for a limited time while the server is unreachable."""
        limit, told = self._clock.now() + _UNREACHABLE_S, False
        while True:
            try:
                return ask()
            except Unreachable as error:
                if self._clock.now() > limit:
                    raise
                if not told:
                    self._note(f"{error}; the run may still be running; retrying")
                told = True
                self._clock.sleep(_PAUSE_S)


def replace_driver(api: JobsApi, run: Run, mode: Mode | None = None, max_steps: int | None = None) -> None:
    """Submit the run's next attempt with the package and the environment of the last one.

    Without `mode`, a pending stop stays pending (also one that reached the job before its driver could handle it); any
    other run continues. Returns also when another process has submitted the attempt. Raises PackageGone when the
    cluster no longer has the package.
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
        logger.info("%s was submitted by another process", submission.submission_id)


def tell_to_stop(api: JobsApi, record: JobRecord) -> None:
    """Make the attempt end its run as planned, unless it was submitted to do so."""
    if DriverCommand.of_line(record.entrypoint).mode != "stop":
        api.stop(record.submission_id)


def _loop(outcome: Outcome) -> str:
    return (
        f"{attempts.SHORT_LIVES} drivers in a row were lost before they did anything, each within "
        f"{attempts.SHORT_LIFE_S:.0f} s or because storage was unavailable ({outcome.reason}); the run may continue "
        "without a driver"
    )
