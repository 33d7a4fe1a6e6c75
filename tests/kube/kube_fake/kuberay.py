"""What KubeRay's operator does with the objects in the fake, one round at a time and only when it is told to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kube_fake.validation import Manifest

if TYPE_CHECKING:
    from kube_fake.server import FakeKubernetes

_MANAGER = "kuberay-operator"
_FINALIZER = "ray.io/rayjob-finalizer"
SUBMITTER = "ray-job-submitter"


class FakeKubeRay:
    """`stopped` are the RayJobs whose job was told to stop on deletion, as the operator's finalizer does."""

    def __init__(self, kubernetes: FakeKubernetes) -> None:
        self._kubernetes = kubernetes
        self.stopped: list[str] = []

    def reconcile(self) -> None:
        """A RayJob gets its RayCluster, a RayCluster its pods; what is to be deleted goes."""
        for job in self._all("RayJob"):
            self._job(job)
        for cluster in self._all("RayCluster"):
            if "deletionTimestamp" not in cluster["metadata"]:
                self._cluster(cluster)

    def run(self, name: str, namespace: str = "team") -> str:
        """Up to a running job. Returns the name of its submitter's pod."""
        self.reconcile()
        job = self._kubernetes.objects("RayJob", namespace)[name]
        for pod in self._pods(job["status"]["rayClusterName"], namespace):
            self._pod_runs(pod, "ray-head")
        attempt = sum(1 for each in self._kubernetes.objects("Pod", namespace) if each.startswith(f"{name}-submit"))
        labels = {
            "ray.io/originated-from-cr-name": name,
            "ray.io/originated-from-crd": "RayJob",
            "batch.kubernetes.io/job-name": name,
        }
        pod = self._pod(f"{name}-submit{attempt}", namespace, labels, job, SUBMITTER)
        self._pod_runs(pod, SUBMITTER)
        self._status(job, jobDeploymentStatus="Running", jobStatus="RUNNING")
        return str(pod["metadata"]["name"])

    def finish(self, name: str, status: str, message: str = "", reason: str = "", namespace: str = "team") -> None:
        """`status` as Ray's Jobs API has it: SUCCEEDED, FAILED, STOPPED."""
        job = self._kubernetes.objects("RayJob", namespace)[name]
        deployment = "Failed" if status == "FAILED" or reason else "Complete"
        self._status(job, jobDeploymentStatus=deployment, jobStatus=status, message=message, reason=reason)

    def end_pod(self, name: str, exit_code: int = 0, namespace: str = "team") -> None:
        state = {"terminated": {"exitCode": exit_code}}
        phase = "Succeeded" if exit_code == 0 else "Failed"
        pod = self._kubernetes.objects("Pod", namespace)[name]
        container = pod["spec"]["containers"][0]["name"]
        statuses = [{"name": container, "ready": False, "state": state}]
        self._kubernetes.set_status("Pod", namespace, name, {"phase": phase, "containerStatuses": statuses})

    def _job(self, job: Manifest) -> None:
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        if "deletionTimestamp" in job["metadata"]:
            if _FINALIZER in job["metadata"].get("finalizers", []):
                if job.get("status", {}).get("jobStatus") not in ("SUCCEEDED", "FAILED", "STOPPED"):
                    self.stopped.append(name)
                self._set_finalizers(job, [each for each in job["metadata"]["finalizers"] if each != _FINALIZER])
            return
        if "rayClusterName" in job.get("status", {}):
            return
        self._set_finalizers(job, [_FINALIZER])
        cluster = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {
                "name": f"{name}-abcde",
                "namespace": namespace,
                "labels": {
                    **job["metadata"].get("labels", {}),
                    "ray.io/originated-from-cr-name": name,
                    "ray.io/originated-from-crd": "RayJob",
                },
                "ownerReferences": [_owner(job)],
            },
            "spec": job["spec"]["rayClusterSpec"],
        }
        self._kubernetes.add(cluster, _MANAGER)
        self._status(job, jobDeploymentStatus="Initializing", rayClusterName=f"{name}-abcde", jobId=f"{name}-xyz")

    def _cluster(self, cluster: Manifest) -> None:
        """Pods as many as wanted, the ones that the autoscaler named taken away."""
        name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
        pods = {pod["metadata"]["name"]: pod for pod in self._pods(name, namespace)}
        if not any(_group(pod) == "headgroup" for pod in pods.values()):
            labels = {"ray.io/cluster": name, "ray.io/node-type": "head", "ray.io/group": "headgroup"}
            template = cluster["spec"]["headGroupSpec"]["template"]
            self._pod(f"{name}-head", namespace, _with_labels(template, labels), cluster, "ray-head")
        for group in cluster["spec"].get("workerGroupSpecs", []):
            for doomed in group.get("scaleStrategy", {}).get("workersToDelete", []):
                if doomed in pods:
                    self._kubernetes.table.delete(self._kubernetes.resource("Pod"), namespace, doomed, {})
                    del pods[doomed]
            wanted = max(group["replicas"], group["minReplicas"]) * group.get("numOfHosts", 1)
            here = {each for each, pod in pods.items() if _group(pod) == group["groupName"]}
            for missing in list(self._free_names(f"{name}-{group['groupName']}-", here))[: max(0, wanted - len(here))]:
                labels = {"ray.io/cluster": name, "ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
                self._pod(missing, namespace, _with_labels(group["template"], labels), cluster, "ray-worker")

    def _free_names(self, prefix: str, taken: set[str]) -> Iterator[str]:
        return (f"{prefix}{number}" for number in range(100) if f"{prefix}{number}" not in taken)

    def _pod(self, name: str, namespace: str, labels: Mapping[str, str], owner: Manifest, container: str) -> Manifest:
        metadata = {"name": name, "namespace": namespace, "labels": dict(labels), "ownerReferences": [_owner(owner)]}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"containers": [{"name": container}]},
            "status": {"phase": "Pending"},
        }
        return self._kubernetes.add(body, _MANAGER)

    def _pod_runs(self, pod: Manifest, container: str) -> None:
        statuses = [{"name": container, "ready": True, "state": {"running": {}}}]
        metadata = pod["metadata"]
        status = {"phase": "Running", "containerStatuses": statuses}
        self._kubernetes.set_status("Pod", metadata["namespace"], metadata["name"], status)

    def _status(self, job: Manifest, **status: Any) -> None:
        self._kubernetes.set_status("RayJob", job["metadata"]["namespace"], job["metadata"]["name"], status)

    def _set_finalizers(self, job: Manifest, finalizers: list[str]) -> None:
        def change(live: Manifest) -> Manifest:
            live["metadata"]["finalizers"] = finalizers
            return live

        kubernetes, metadata = self._kubernetes, job["metadata"]
        kubernetes.table.update(
            kubernetes.resource("RayJob"), metadata["namespace"], metadata["name"], change, _MANAGER
        )

    def _pods(self, cluster: str, namespace: str) -> list[Manifest]:
        found = self._kubernetes.objects("Pod", namespace).values()
        return [pod for pod in found if pod["metadata"]["labels"].get("ray.io/cluster") == cluster]

    def _all(self, kind: str) -> list[Manifest]:
        return self._kubernetes.table.find(self._kubernetes.resource(kind), None, "")


def _with_labels(template: Manifest, labels: Mapping[str, str]) -> dict[str, str]:
    """Those of the pod template, and KubeRay's."""
    return {**(template.get("metadata") or {}).get("labels", {}), **labels}


def _group(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"].get("ray.io/group"))


def _owner(manifest: Manifest) -> dict[str, Any]:
    metadata = manifest["metadata"]
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
