"""A Jobs server in memory, for tests. Ships next to the interface and passes the same contract test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from elastic.runtime.handed_environment import VARIABLE
from elastic_jobs.submit.attempts import JobRecord, JobState, identity
from elastic_jobs.submit.jobs_api import AlreadySubmitted, ClusterFacts, PackageGone, Submission

GCS_PACKAGE = "gcs://_ray_pkg_fake.zip"


class FakeJobsApi:
    """`play` is called with every submission and may `say` and `end`; `on_idle` whenever a tail has no output."""

    def __init__(self, facts: ClusterFacts | None = None) -> None:
        self.facts = facts or ClusterFacts("0", ({"CPU": 4.0, "memory": 1e10},))
        self.submissions: list[Submission] = []
        self.play: Callable[[Submission], None] = lambda submission: None
        self.on_stop: Callable[[str], None] = lambda submission_id: self.end(submission_id, JobState.STOPPED)
        self.on_idle: Callable[[str], None] = lambda submission_id: None
        self.packages = {GCS_PACKAGE}
        self.handed: dict[str, dict[str, str]] = {}
        self._records: dict[str, JobRecord] = {}
        self._logs: dict[str, str] = {}
        self._now = 1000.0

    # --- the other side: what a cluster would do ---

    def say(self, submission_id: str, *lines: str) -> None:
        self._logs[submission_id] = self._logs.get(submission_id, "") + "".join(f"{line}\n" for line in lines)

    def end(
        self, submission_id: str, state: JobState, exit_code: int | None = None, *, after_s: float = 100.0,
        error_type: str | None = None, message: str = "",
    ) -> None:  # fmt: skip
        record = self._records[submission_id]
        if error_type is None and state is JobState.FAILED:
            error_type = "JOB_ENTRYPOINT_COMMAND_ERROR"
        ended = replace(record, state=state, exit_code=exit_code, error_type=error_type, message=message)
        self._records[submission_id] = replace(ended, ended_at=(record.started_at or 0.0) + after_s)

    # --- JobsApi ---

    def cluster(self) -> ClusterFacts:
        return self.facts

    def submit(self, submission: Submission) -> None:
        if submission.submission_id in self._records:
            raise AlreadySubmitted(f"there is a job {submission.submission_id!r} already")
        uri = submission.runtime_env.get("working_dir")
        if submission.archive is None and uri is not None and uri not in self.packages:
            raise PackageGone("the cluster no longer has the package of this run")
        self.submissions.append(submission)
        self._now += 1.0
        run_id, attempt = identity(submission.metadata)
        runtime_env = {"working_dir": GCS_PACKAGE, **submission.runtime_env}
        if submission.variables:
            name = f"gcs://elastic-environment-{submission.submission_id}"
            self.handed[name] = dict(submission.variables)
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), VARIABLE: name}
        self._records[submission.submission_id] = JobRecord(
            submission.submission_id, JobState.RUNNING, run_id, attempt, started_at=self._now, node="fake",
            entrypoint=submission.entrypoint, metadata=dict(submission.metadata), runtime_env=runtime_env,
        )  # fmt: skip
        self.play(submission)

    def find(self, submission_id: str) -> JobRecord | None:
        return self._records.get(submission_id)

    def records(self) -> tuple[JobRecord, ...]:
        return tuple(self._records.values())

    def tail(self, submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
        """Ends as soon as the log is exhausted, even while the job runs: the worst behaviour of the real server."""
        while piece := self._logs.get(submission_id, "")[skip_chars:][:7]:
            skip_chars += len(piece)
            yield piece
        if not ended:
            self.on_idle(submission_id)
            yield ""

    def stop(self, submission_id: str) -> bool:
        record = self._records.get(submission_id)
        if record is None or record.state.ended:
            return False
        self.on_stop(submission_id)
        return True
