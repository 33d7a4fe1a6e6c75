"""Optional service accounts and their permissions.

Workers get an account without permissions, whose token is not mounted. The autoscaler sidecar must read pods and
change its own RayCluster. KubeRay makes a role for it unless there is one of the cluster's name; ours is
narrower: that one RayCluster, and no pods to change. The RayCluster of a RayJob gets a random name, which no role
can be made for beforehand; there KubeRay's own is used.
"""

from __future__ import annotations

from elastic_cluster.kube.manifests import labels
from elastic_cluster.kube.manifests.job import KubeJob
from elastic_cluster.kube.manifests.pods import Json

_RBAC = "rbac.authorization.k8s.io"


def access(job: KubeJob) -> list[Json]:
    if not job.rbac:
        return []
    workers = [] if job.service_account else [_account(job, f"{job.name}-worker", mounts=False)]
    if not job.as_cluster:
        return workers
    head = f"{job.name}-head"
    return [*workers, _account(job, head, mounts=True), _role(job), _binding(job, head)]


def _metadata(job: KubeJob, name: str) -> Json:
    return {"name": name, "namespace": job.namespace, "labels": labels.labels(job.run_id)}


def _account(job: KubeJob, name: str, *, mounts: bool) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(job, name),
        "automountServiceAccountToken": mounts,
    }


def _role(job: KubeJob) -> Json:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            "apiGroups": ["ray.io"],
            "resources": ["rayclusters"],
            "resourceNames": [job.name],
            "verbs": ["get", "patch"],
        },
    ]
    return {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": _metadata(job, job.name), "rules": rules}


def _binding(job: KubeJob, account: str) -> Json:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(job, job.name),
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": job.namespace}],
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": job.name},
    }
