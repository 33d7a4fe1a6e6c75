"""Runs from job records: names of attempts, records grouped by run, and the meaning of an ended attempt.

The Jobs API binds a job to one driver and never retries. A run here is all jobs that carry its id; each is one attempt
at being the run's driver, numbered from 1. The run itself lives in its controller, which outlives every driver.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from elastic.core.errors import RunNotFound
from elastic_jobs.exit_codes import DRIVER_BLIND, DRIVER_LOST, FINAL_CODES, NO_CAPACITY, NOT_FINISHED, STOPPED

RUN_KEY = "elastic-run"
ATTEMPT_KEY = "elastic-attempt"
STORAGE_KEY = "elastic-storage"
VERSION_KEY = "elastic-version"
# Names of the variables that were taken from the submitter's environment.
TAKEN_KEY = "elastic-env"

# An attempt that is lost this soon after its start has done nothing; after this many in a row no more are sent.
SHORT_LIFE_S = 60.0
SHORT_LIVES = 3


class JobState(str, Enum):
    """As the Jobs API reports it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def ended(self) -> bool:
        return self not in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class JobRecord:
    """One job of the Jobs API. Times in seconds since the epoch.

    `runtime_env` holds the values of environment variables that were given, so it is never printed: see `redacted`.
    """

    submission_id: str
    state: JobState
    run_id: str | None = None
    attempt: int = 0
    exit_code: int | None = None
    error_type: str | None = None
    message: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    node: str | None = None
    entrypoint: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def short_lived(self) -> bool:
        """Lost before it did anything. An attempt that reported the end of its run, or was stopped, is not lost."""
        if self.state is not JobState.FAILED or self.exit_code in FINAL_CODES:
            return False
        if self.exit_code == DRIVER_BLIND:
            # It only waited for storage, up to the limit.
            return True
        known = self.started_at is not None and self.ended_at is not None
        return known and self.ended_at - self.started_at < SHORT_LIFE_S  # type: ignore[operator]

    def redacted(self) -> dict[str, Any]:
        """For people and programs: names of environment variables without their values."""
        shown = {**vars(self), "state": self.state.value, "metadata": dict(self.metadata)}
        names = [*(self.runtime_env.get("env_vars") or {}), *filter(None, self.metadata.get(TAKEN_KEY, "").split(","))]
        shown["runtime_env"] = {**self.runtime_env, "env_vars": dict.fromkeys(names, "<redacted>")}
        return shown


@dataclass(frozen=True)
class Run:
    """All attempts of one run, oldest first; never empty."""

    run_id: str
    attempts: tuple[JobRecord, ...]

    @property
    def newest(self) -> JobRecord:
        return self.attempts[-1]

    @property
    def next_attempt(self) -> int:
        return self.newest.attempt + 1

    @property
    def storage_url(self) -> str | None:
        return self.newest.metadata.get(STORAGE_KEY)

    @property
    def crash_loop(self) -> bool:
        """Whether all of the last attempts were lost before they did anything."""
        last = self.attempts[-SHORT_LIVES:]
        return len(last) == SHORT_LIVES and all(record.short_lived for record in last)


def submission_id(run_id: str, attempt: int) -> str:
    """For example "gpt-20260102-030405-ab12-a1". Ray accepts an id once, so one of two submitters is refused."""
    return f"{run_id}-a{attempt}"


def metadata(run_id: str, attempt: int, storage_url: str, version: str) -> dict[str, str]:
    return {RUN_KEY: run_id, ATTEMPT_KEY: str(attempt), STORAGE_KEY: storage_url, VERSION_KEY: version}


def identity(metadata: Mapping[str, str] | None) -> tuple[str | None, int]:
    """(run id, attempt) from a job's metadata; (None, 0) for jobs that are not ours."""
    found = metadata or {}
    run_id, attempt = found.get(RUN_KEY), found.get(ATTEMPT_KEY, "")
    return (run_id, int(attempt)) if run_id and re.fullmatch(r"[0-9]{1,9}", attempt) else (None, 0)


def merge(records: Sequence[JobRecord]) -> tuple[Run, ...]:
    """Newest run first, without jobs that are not ours."""
    by_run: dict[str, list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.run_id is not None:
            by_run[record.run_id].append(record)
    found = [Run(run_id, tuple(sorted(own, key=lambda r: r.attempt))) for run_id, own in by_run.items()]
    return tuple(sorted(found, key=lambda run: run.newest.started_at or 0.0, reverse=True))


def find(records: Sequence[JobRecord], name: str) -> Run:
    """By run id or by the submission id of an attempt. Raises RunNotFound naming the nearest known one."""
    found = merge(records)
    for run in found:
        if run.run_id == name or any(record.submission_id == name for record in run.attempts):
            return run
    names = [run.run_id for run in found]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or names[:1]
    hint = f"did you mean {near[0]!r}?" if near else "no run was ever submitted there"
    raise RunNotFound(f"the cluster knows no run {name!r}; {hint}")


# -- the outcome of an attempt -----------------------------------------------------------------------------------------


class Verdict(Enum):
    RUNNING = "running"
    OVER = "over"
    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """LOST: the driver is gone without a report of the run, so another attempt is due. FAILED: none would help."""

    verdict: Verdict
    exit_code: int = NOT_FINISHED
    reason: str = ""


_LOST_TYPES = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
_NO_PLACE_TYPES = ("JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE", "JOB_SUPERVISOR_ACTOR_START_TIMEOUT")


def judge(record: JobRecord, began: bool, told: Mapping[str, Any] | None) -> Outcome:
    """`began`: the driver has reached its run. `told`: its report of the run's end, if there is one."""
    if not record.state.ended:
        return Outcome(Verdict.RUNNING)
    if told is not None:
        return Outcome(Verdict.OVER, _trusted(told.get("exit_code")), str(told.get("reason") or ""))
    if record.state is JobState.SUCCEEDED:
        return Outcome(Verdict.OVER, 0)
    if record.state is JobState.STOPPED:
        return _stopped(record, began)
    if record.error_type in _NO_PLACE_TYPES:
        return Outcome(Verdict.FAILED, NO_CAPACITY, f"no node could host the driver: {_last_line(record.message)}")
    if record.exit_code in FINAL_CODES:
        return Outcome(Verdict.OVER, _trusted(record.exit_code), _last_line(record.message))
    # A killed driver may have started the run without reporting it.
    if began or _signal(record) or _supervisor_lost(record) or record.exit_code in (DRIVER_LOST, DRIVER_BLIND):
        return Outcome(Verdict.LOST, reason=_how_lost(record))
    return Outcome(Verdict.FAILED, NOT_FINISHED, f"the driver did not start: {_last_line(record.message)}")


def _stopped(record: JobRecord, began: bool) -> Outcome:
    if not began and record.attempt > 1:
        # The run may continue, unaware of the stop.
        return Outcome(Verdict.LOST, reason="its driver was stopped before it had reached its run")
    if not began:
        return Outcome(Verdict.OVER, STOPPED, "stopped before the run had begun")
    reason = "the driver was killed when its grace period was over; the controller may still be stopping the run"
    return Outcome(Verdict.FAILED, NOT_FINISHED, reason)


def _trusted(code: object) -> int:
    return code if isinstance(code, int) and code in FINAL_CODES else NOT_FINISHED


def _how_lost(record: JobRecord) -> str:
    if record.exit_code is None:
        return f"its driver's node or supervisor is gone ({_last_line(record.message)})"
    if record.exit_code == DRIVER_BLIND:
        return "its driver found no controller, and could not read the state of the run in storage"
    number = _signal(record)
    return f"its driver was killed by signal {number}" if number else f"exit code {record.exit_code}"


def _supervisor_lost(record: JobRecord) -> bool:
    """A restarted Jobs server reports that a running job did not start (read, 2.60)."""
    if record.error_type == "JOB_SUPERVISOR_ACTOR_START_FAILURE":
        return record.node is not None
    return record.error_type in _LOST_TYPES


def _signal(record: JobRecord) -> int | None:
    """The signal that killed the driver; None if it ended on its own."""
    code = record.exit_code or 0
    # A shell reports a signal as an exit code of 128 + its number.
    number = -code if code < 0 else code - 128
    return number if 0 < number < 65 else None


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing more is known"
