"""The Ray Jobs API as the command line sees it: the seam, what goes over it, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elastic.core.errors import ElasticError, UsageError
from elastic_jobs.submit.attempts import JobRecord


class Unreachable(ElasticError):
    """The Jobs server does not answer, or not sensibly; it may later."""


class Denied(UsageError):
    """The Jobs server wants another token."""


class AlreadySubmitted(UsageError):
    """The submission id was used before: somebody else was first."""


class PackageGone(UsageError):
    """The cluster no longer has the package that a new attempt was to use."""


@dataclass(frozen=True)
class DriverNeeds:
    """What Ray reserves for the driver. With anything above zero the driver is not tied to the head node.

    Memory by default, not CPU: a node whose CPUs are all meant for a slot could not take that slot any more.
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
    """One job to be. The package is either `archive`, a local zip file, or a URI in `runtime_env["working_dir"]`."""

    submission_id: str
    entrypoint: str
    metadata: Mapping[str, str]
    needs: DriverNeeds
    runtime_env: Mapping[str, Any] = field(repr=False)
    archive: Path | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """`nodes`: what each living node has in all, by resource. `autoscaling`: more nodes may come."""

    ray_version: str
    nodes: tuple[Mapping[str, float], ...] = ()
    autoscaling: bool = False


class JobsApi(Protocol):
    """1. `cluster` once, before anything is sent; 2. `submit`; 3. `find`, `records`, `tail` at any time; 4. `stop`.

    All raise Unreachable and Denied. Nothing here retries or waits for a job; every call has a limit in time.
    """

    def cluster(self) -> ClusterFacts: ...

    def submit(self, submission: Submission) -> None:
        """Raises AlreadySubmitted when the id was used before, whoever did, and PackageGone."""
        ...

    def find(self, submission_id: str) -> JobRecord | None: ...

    def records(self) -> tuple[JobRecord, ...]: ...

    def tail(self, submission_id: str, skip_chars: int, ended: bool) -> Iterator[str]:
        """The log in pieces, as it grows; "" whenever nothing has come for a second.

        May end while the job still runs (ray#60665): ask `find`, and tail again with what is known skipped. Of a job
        that is known to have `ended` it is what there is, at once; nothing, where its node is gone. Only then does it
        raise Unreachable.
        """
        ...

    def stop(self, submission_id: str) -> bool:
        """Ask Ray to end the driver: SIGTERM, and SIGKILL when the job's grace period is over. False: had ended."""
        ...
