"""Runs in a namespace: found by their labels, looked at, deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from elastic_cluster.kube.client.api import Cluster, Manifest, Ref
from elastic_cluster.kube.client.errors import KubeDenied, KubeNotFound, KubeUnavailable
from elastic_cluster.kube.client.status import RunStatus, run_status
from elastic_cluster.kube.manifests.labels import selector

_log = logging.getLogger(__name__)
_RAY = "ray.io/v1"
# What a run may consist of, in the order in which it is deleted: first what makes pods, last what they needed.
KINDS = (
    (_RAY, "RayJob"),
    (_RAY, "RayCluster"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("v1", "ServiceAccount"),
    ("v1", "ConfigMap"),
    ("v1", "Secret"),
)
# The journal of the control store lives on it: deleted only on request.
VOLUMES = ("v1", "PersistentVolumeClaim")
_WATCH_S = 10.0
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Deleted:
    """`left` are the objects that were still there when the time was over, with what holds them."""

    gone: tuple[Ref, ...]
    left: tuple[str, ...]


def find_main(cluster: Cluster, run_id: str, namespace: str) -> Manifest:
    """The RayJob of a run, or its RayCluster where it has no job. Raises KubeNotFound."""
    for api_version, kind in KINDS[:2]:
        for found in cluster.find(api_version, kind, namespace, selector(run_id)):
            return found
    raise KubeNotFound(
        f"there is no run {run_id} in namespace {namespace}: `elastic kube status --namespace {namespace}` lists those "
        "that there are"
    )


def find_runs(cluster: Cluster, namespace: str) -> list[RunStatus]:
    """All runs of a namespace, without their pods."""
    found = [main for version, kind in KINDS[:2] for main in cluster.find(version, kind, namespace, selector())]
    # KubeRay hands the labels of a RayJob on to its RayCluster.
    return [run_status(main) for main in found if "ownerReferences" not in main["metadata"]]


def look(cluster: Cluster, run_id: str, namespace: str) -> RunStatus:
    """A run with its cluster and pods. Raises KubeNotFound."""
    main = find_main(cluster, run_id, namespace)
    name = _cluster_name(main)
    ray = cluster.get(Ref(_RAY, "RayCluster", namespace, name)) if name else None
    try:
        pods = pods_of(cluster, main)
    except KubeDenied as error:
        # The run's own state is worth showing to somebody who may see nothing else.
        _log.warning("its pods are not shown: %s", error)
        pods = []
    return run_status(main, ray, pods)


def pods_of(cluster: Cluster, main: Manifest) -> list[Manifest]:
    """Submitters first, then head and workers."""
    metadata, name = main["metadata"], _cluster_name(main)
    pods = submitters(cluster, main) if main["kind"] == "RayJob" else []
    if name:
        pods += cluster.find("v1", "Pod", metadata["namespace"], f"ray.io/cluster={name},ray.io/node-type")
    return pods


def submitters(cluster: Cluster, job: Manifest) -> list[Manifest]:
    """The pods of the Kubernetes Job that hands the entry point to Ray, oldest first: it makes another if one fails."""
    metadata = job["metadata"]
    # The head's pod may carry KubeRay's labels of the job as well; only the Job's own pods carry its name.
    found = cluster.find("v1", "Pod", metadata["namespace"], f"batch.kubernetes.io/job-name={metadata['name']}")
    return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))


def delete_run(
    cluster: Cluster, run_id: str, namespace: str, limit_s: float, *, volumes: bool, say: Callable[[str], None]
) -> Deleted:
    """What carries the run's labels, each gone before the next is touched, its pods included. Raises KubeError."""
    deadline = time.monotonic() + limit_s
    gone: list[Ref] = []
    clusters: set[str] = set()
    # What pods need (tokens, network, permissions) goes only after they have left in good order.
    for kinds in (KINDS[:2], (*KINDS[2:], *([VOLUMES] if volumes else []))):
        for found in _objects(cluster, run_id, namespace, kinds, say):
            ref, uid = Ref.of(found, namespace), str(found["metadata"]["uid"])
            clusters.add(_cluster_name(found))
            # In the foreground the pods would go at once, while the operator is still telling the job to stop.
            cluster.delete(ref, uid, foreground=ref.kind != "RayJob")
            say(f"deleting {ref}")
            if not wait_gone(cluster, ref, uid, deadline):
                return Deleted(tuple(gone), (_held(cluster, ref),))
            gone.append(ref)
        if left := _pods_left(cluster, clusters, namespace, deadline):
            return Deleted(tuple(gone), left)
        clusters.clear()
    if not gone:
        raise KubeNotFound(f"there is nothing of run {run_id} in namespace {namespace}")
    return Deleted(tuple(gone), ())


def wait_gone(cluster: Cluster, ref: Ref, uid: str, deadline: float) -> bool:
    """False when the deadline (monotonic) comes first. Another object of the same name does not count."""
    while True:
        now = cluster.get(ref, metadata_only=True)
        if now is None or now["metadata"]["uid"] != uid:
            return True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        told = next(iter(cluster.watch(ref, now["metadata"]["resourceVersion"], min(left_s, _WATCH_S))), now)
        if told is not None:
            # It changes again and again, or cannot be watched: either may come back at once.
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))


def _pods_left(cluster: Cluster, names: set[str], namespace: str, deadline: float) -> tuple[str, ...]:
    """Waits for the pods of these RayClusters to go. Those that have not when the deadline comes."""
    pods = [
        pod for name in sorted(names - {""}) for pod in cluster.find("v1", "Pod", namespace, f"ray.io/cluster={name}")
    ]
    refs = [(Ref.of(pod), str(pod["metadata"]["uid"])) for pod in pods]
    return tuple(str(ref) for ref, uid in refs if not wait_gone(cluster, ref, uid, deadline))


def _objects(
    cluster: Cluster, run_id: str, namespace: str, kinds: Sequence[tuple[str, str]], say: Callable[[str], None]
) -> Iterator[Manifest]:
    for api_version, kind in kinds:
        try:
            # The status of a RayJob is needed, too; the contents of a Secret are not.
            whole = (api_version, kind) in KINDS[:2]
            yield from cluster.find(api_version, kind, namespace, selector(run_id), metadata_only=not whole)
        except KubeDenied as error:
            if kind in ("RayJob", "RayCluster"):
                raise
            # Without `list` permission for a kind we have not applied one; objects of other users are reported.
            say(f"{kind}s are left as they are: {error}")


def _held(cluster: Cluster, ref: Ref) -> str:
    try:
        now = cluster.get(ref)
    except KubeUnavailable:
        now = None
    finalizers = (now or {"metadata": {}})["metadata"].get("finalizers") or []
    return f"{ref} (held by {', '.join(finalizers)})" if finalizers else str(ref)


def _cluster_name(main: Manifest) -> str:
    """Of a RayJob's RayCluster, or of a RayCluster; "" where there is none."""
    if main["kind"] == "RayCluster":
        return str(main["metadata"]["name"])
    if main["kind"] != "RayJob":
        return ""
    return str((main.get("status") or {}).get("rayClusterName") or "")
