"""The interface to the Ray Jobs API: its methods, the records that it exchanges, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elastic.core.errors import ElasticError, UsageError
from elastic_jobs.submit.attempts import JobRecord


class Unreachable(ElasticError):
    """The Jobs server does not answer, or its answer makes no sense. Retrying may help."""


class Denied(UsageError):
    """The Jobs server refuses our token."""


class AlreadySubmitted(UsageError):
    """The submission id is taken: another client was first."""


class PackageGone(UsageError):
    """The cluster no longer has the package that the new attempt needs."""


@dataclass(frozen=True)
class DriverNeeds:
    """What Ray reserves for the driver. If any amount is above zero, the driver may run on any node, not only the head.

    By default memory is reserved and no CPU, so that a slot that needs all CPUs of a node can be placed next to the
    driver.
    """

    cpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps({**vars(self), "resources": dict(self.resources), "labels": dict(self.labels)})

    @classmethod
    def of_text(cls, text: str | None) -> DriverNeeds:
        return cls(**json.loads(text)) if text else cls()


@dataclass(frozen=True)
class Submission:
    """A job to submit. The package is either `archive`, a local zip file, or a URI in `runtime_env["working_dir"]`.

    `variables` reach the processes of the job without being part of what Ray knows of it: see
    `elastic.runtime.handed_environment`. The next attempt's `runtime_env` names them.
    """

    submission_id: str
    entrypoint: str
    metadata: Mapping[str, str]
    needs: DriverNeeds
    runtime_env: Mapping[str, Any] = field(repr=False)
    archive: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ClusterFacts:
    """`nodes`: the total resources of each living node. `autoscaling`: an autoscaler may add nodes."""

    ray_version: str
    nodes: tuple[Mapping[str, float], ...] = ()
    autoscaling: bool = False


class JobsApi(Protocol):
    """Call order: 1. `cluster` once, before anything is sent; 2. `submit`; 3. `find`, `records`, `tail` at any time;
    4. `stop`.

    All raise Unreachable and Denied. No method retries or waits for a job; every call has a time limit.
    """

    def cluster(self) -> ClusterFacts: ...

    def submit(self, submission: Submission) -> None:
        """Raises AlreadySubmitted if the id is taken, by whichever client, and PackageGone."""
        ...

    def find(self, submission_id: str) -> JobRecord | None: ...

    def records(self) -> tuple[JobRecord, ...]: ...

    def tail(self, submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
        """The log in pieces, as it grows; "" after each second without output.

        May end while the job still runs (ray#60665): call `find`, then `tail` again, skipping what is known. For a job
        that has `ended`, yields the remaining log at once; if its node is gone, nothing. Raises Unreachable only then.
        """
        ...

    def stop(self, submission_id: str) -> bool:
        """Ask Ray to end the driver: SIGTERM, then SIGKILL after the job's grace period. False: it had ended."""
        ...
