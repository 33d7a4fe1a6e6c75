"""What the objects of a run say about it, as one word and one sentence. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_cluster.kube.manifests.labels import run_of

# Words of `RunStatus.state`.
PENDING, STARTING, RUNNING, RETRYING, SUSPENDED = "pending", "starting", "running", "retrying", "suspended"
FINISHED, FAILED, STOPPED, REFUSED, DELETING = "finished", "failed", "stopped", "refused", "deleting"

# KubeRay's `jobDeploymentStatus`. A `jobStatus` of FAILED alone is not the end: the operator may still retry.
_DEPLOYMENT = {
    "": PENDING,
    "Initializing": STARTING,
    "Waiting": STARTING,
    "Running": RUNNING,
    "Retrying": RETRYING,
    "Suspending": SUSPENDED,
    "Suspended": SUSPENDED,
    "Complete": FINISHED,
    "Failed": FAILED,
    "ValidationFailed": REFUSED,
}
_OVER = {FINISHED, FAILED, STOPPED, REFUSED}
_EXIT_CODE = re.compile(r"Job entrypoint command failed with exit code (-?\d+)")
_FINE = {"ContainerCreating", "PodInitializing"}


@dataclass(frozen=True)
class PodStatus:
    """`problem` is why it does not run, as far as Kubernetes says; "" when there is none."""

    name: str
    group: str
    phase: str
    problem: str


@dataclass(frozen=True)
class RunStatus:
    """`workers` are ready, wanted, and at most; None where there is no cluster. `exit_code` is the driver's own."""

    run: str
    kind: str
    name: str
    namespace: str
    state: str
    reason: str
    exit_code: int | None = None
    workers: tuple[int, int, int] | None = None
    failures: int = 0
    dashboard: str = ""
    pods: tuple[PodStatus, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing will happen to it by itself any more."""
        return self.state in _OVER

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"pod {pod.name}: {pod.problem}" for pod in self.pods if pod.problem)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "over": self.over}


def run_status(
    main: Mapping[str, Any], cluster: Mapping[str, Any] | None = None, pods: Sequence[Mapping[str, Any]] = ()
) -> RunStatus:
    """`main` is the RayJob, or the RayCluster of a run without a job; `cluster` is the RayJob's, where it has one."""
    status, metadata = main.get("status") or {}, main["metadata"]
    job = main["kind"] == "RayJob"
    state = _job_state(status) if job else _cluster_state(main)
    if "deletionTimestamp" in metadata:
        state = DELETING
    return RunStatus(
        run=run_of(main) or str(metadata["name"]),
        kind=str(main["kind"]),
        name=str(metadata["name"]),
        namespace=str(metadata["namespace"]),
        state=state,
        reason=_reason(status),
        exit_code=_exit_code(status) if job else None,
        workers=_workers(main if not job else cluster),
        failures=int(status.get("failed") or 0),
        dashboard=str(status.get("dashboardURL") or ""),
        pods=tuple(pod_status(pod) for pod in pods),
    )


def pod_status(pod: Mapping[str, Any]) -> PodStatus:
    status, metadata = pod.get("status") or {}, pod["metadata"]
    found = metadata.get("labels") or {}
    group = str(found.get("ray.io/group") or ("submitter" if "ray.io/originated-from-cr-name" in found else ""))
    phase = "Terminating" if "deletionTimestamp" in metadata else str(status.get("phase") or "Pending")
    return PodStatus(str(metadata["name"]), group, phase, _pod_problem(status))


def _job_state(status: Mapping[str, Any]) -> str:
    state = _DEPLOYMENT.get(str(status.get("jobDeploymentStatus") or ""), PENDING)
    if state == FINISHED and status.get("jobStatus") == "STOPPED":
        return STOPPED
    # Complete without a verdict of the job is no success.
    return FAILED if state == FINISHED and status.get("jobStatus") != "SUCCEEDED" else state


def _cluster_state(cluster: Mapping[str, Any]) -> str:
    match (cluster.get("status") or {}).get("state"):
        case "ready":
            return RUNNING
        case "suspended":
            return SUSPENDED
        case "failed":
            return FAILED
        case None | "":
            return PENDING
        case _:
            return STARTING


def _reason(status: Mapping[str, Any]) -> str:
    """The message's first line: after it comes the end of the job's log."""
    lines = str(status.get("message") or "").strip().splitlines()
    # "..., last available logs (truncated to 20,000 chars):" announces the part that is left out here.
    parts = [str(status.get("reason") or ""), lines[0].partition(", last available logs")[0] if lines else ""]
    return ": ".join(part for part in parts if part)


def _exit_code(status: Mapping[str, Any]) -> int | None:
    """Ray's Jobs API says it at the very beginning of the message; what follows is the job's own text."""
    found = _EXIT_CODE.match(str(status.get("message") or ""))
    return int(found[1]) if found else None


def _workers(cluster: Mapping[str, Any] | None) -> tuple[int, int, int] | None:
    if cluster is None:
        return None
    status = cluster.get("status") or {}
    ready, wanted, most = (
        status.get(key) or 0 for key in ("readyWorkerReplicas", "desiredWorkerReplicas", "maxWorkerReplicas")
    )
    return int(ready), int(wanted), int(most)


def _pod_problem(status: Mapping[str, Any]) -> str:
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") and waiting["reason"] not in _FINE:
            return _joined(waiting)
        if ended.get("exitCode"):
            return f"{container['name']} ended with {ended.get('reason') or 'exit code'} {ended['exitCode']}"
    for condition in status.get("conditions") or []:
        waits = status.get("phase") == "Pending" and condition.get("type") == "PodScheduled"
        if waits and condition.get("status") == "False":
            return _joined(condition)
    return str(status.get("reason") or "") if status.get("phase") == "Failed" else ""


def _joined(found: Mapping[str, Any]) -> str:
    return ": ".join(str(found[key]) for key in ("reason", "message") if found.get(key))
