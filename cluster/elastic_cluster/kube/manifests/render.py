"""A job as manifests. Pure: the same job gives the same manifests, and nothing is read or written."""

from __future__ import annotations

import json
import shlex
from typing import Any

from elastic_cluster.kube.manifests import labels, names, pods
from elastic_cluster.kube.manifests.access import access
from elastic_cluster.kube.manifests.job import Group, KubeJob, Place
from elastic_cluster.kube.manifests.network import policies
from elastic_cluster.kube.manifests.pods import Json, secret_key

API = "ray.io/v1"


def render(job: KubeJob) -> list[Json]:
    """What has to be there first comes first; the RayJob or RayCluster is the last."""
    manifests = [*_files(job), *access(job), *policies(job)]
    return [*manifests, _ray_cluster(job) if job.as_cluster else _ray_job(job)]


def metadata(job: KubeJob, name: str) -> Json:
    return {"name": name, "namespace": job.namespace, "labels": labels.labels(job.run_id)}


def _files(job: KubeJob) -> list[Json]:
    if not job.files or job.as_cluster:
        return []
    data = {pods.file_key(path): text for path, text in sorted(job.files.items())}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, f"{job.name}-files"), "data": data}]


def _ray_job(job: KubeJob) -> Json:
    spec: Json = {
        "entrypoint": shlex.join(job.command),
        # The driver has a pod of its own: not the head, which may go away, and not a worker, which comes and goes.
        "entrypointResources": json.dumps({names.CONTROLLER_RESOURCE: 1}),
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": pods.submitter_pod(job),
        "submitterConfig": {"backoffLimit": 2},
        "runtimeEnvYAML": f'env_vars:\n  RAY_JOB_STOP_WAIT_TIME_S: "{job.stop_s}"\n',
        "metadata": {labels.RUN: job.run_id},
        "backoffLimit": job.backoff_limit,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": job.ttl_s,
        "rayClusterSpec": _cluster_spec(job),
    }
    if job.deadline_s is not None:
        spec["activeDeadlineSeconds"] = job.deadline_s
    return {"apiVersion": API, "kind": "RayJob", "metadata": _top(job), "spec": spec}


def _ray_cluster(job: KubeJob) -> Json:
    return {"apiVersion": API, "kind": "RayCluster", "metadata": _top(job), "spec": _cluster_spec(job)}


def _top(job: KubeJob) -> Json:
    top = metadata(job, job.name)
    # KubeRay hands a RayJob's annotations on to its RayCluster.
    top["annotations"] = {names.OVERWRITE_COMMAND: "true"}
    if job.queue is not None:
        top["labels"][names.QUEUE] = job.queue
        top["annotations"][names.ELASTIC_JOB] = "true"
    return top


def drain_s(job: KubeJob) -> int:
    """Of head and controller, which must be there for as long as any worker drains."""
    return max(group.drain_s for group in job.groups)


def _cluster_spec(job: KubeJob) -> Json:
    spec: Json = {
        "rayVersion": job.ray_version,
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": job.idle_timeout_s,
            "upscalingMode": "Default",
            "securityContext": pods.container_security(),
        },
        "authOptions": {"mode": "token"},
        "headGroupSpec": _head(job),
        "workerGroupSpecs": [_controller(job), *(_workers(job, group) for group in job.groups)],
    }
    if job.token_secret is not None:
        spec["authOptions"]["secretName"] = job.token_secret
    if job.control_store.kind != "none":
        spec["gcsFaultToleranceOptions"] = _control_store(job)
    return spec


def _head(job: KubeJob) -> Json:
    template = pods.ray_pod(job, job.head, job.head_place, drain_s=0, user=False)
    spec = template["spec"]
    # The whole cluster may be terminated at once. Ray's head has nothing to drain and would exit at once, and with it
    # all that the workers need in order to leave well; so it waits for them.
    wait_s = drain_s(job) + pods.SHUTDOWN_S
    spec["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sleep", str(wait_s)]}}}
    spec["terminationGracePeriodSeconds"] = wait_s + pods.SHUTDOWN_S
    template["metadata"]["annotations"] = dict(names.STAY)
    if job.rbac and job.as_cluster:
        spec["serviceAccountName"] = f"{job.name}-head"
    params = {"num-cpus": "0", "object-store-memory": str(pods.object_store_bytes(job.head))}
    return {"rayStartParams": params, "template": template}


def _controller(job: KubeJob) -> Json:
    """One pod for driver and controller. It reports no CPUs to Ray, so that no worker is placed on it."""
    template = pods.ray_pod(job, job.controller, job.controller_place, drain_s=drain_s(job), files=not job.as_cluster)
    template["metadata"]["annotations"] = dict(names.STAY)
    _without_account(job, template)
    return {
        "groupName": names.CONTROLLER_GROUP,
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "numOfHosts": 1,
        "resources": {"CPU": "0", names.CONTROLLER_RESOURCE: "1"},
        "rayStartParams": {"object-store-memory": str(pods.object_store_bytes(job.controller))},
        "template": template,
    }


def _workers(job: KubeJob, group: Group) -> Json:
    place = group.place
    node_labels = {names.MARKET_TYPE: group.capacity, **group.labels}
    if group.zone is not None:
        place = Place({**place.node_selector, names.NODE_ZONE: group.zone}, place.tolerations)
        node_labels[names.ZONE] = group.zone
    template = pods.ray_pod(job, group.size, place, drain_s=group.drain_s, zone=group.zone is None)
    _without_account(job, template)
    spec: Json = {
        "groupName": group.name,
        "replicas": group.min_replicas,
        "minReplicas": group.min_replicas,
        "maxReplicas": group.max_replicas,
        "numOfHosts": group.hosts,
        "priority": group.priority,
        "idleTimeoutSeconds": group.idle_timeout_s if group.idle_timeout_s is not None else job.idle_timeout_s,
        "labels": dict(sorted(node_labels.items())),
        "rayStartParams": {"object-store-memory": str(pods.object_store_bytes(group.size))},
        "template": template,
    }
    if group.resources:
        spec["resources"] = {name: str(count) for name, count in sorted(group.resources.items())}
    return spec


def _without_account(job: KubeJob, template: Json) -> None:
    """User code runs here, so the pod gets no access to the Kubernetes API."""
    template["spec"]["automountServiceAccountToken"] = False
    account = job.service_account or (f"{job.name}-worker" if job.rbac else None)
    if account is not None:
        template["spec"]["serviceAccountName"] = account


def _control_store(job: KubeJob) -> Json:
    store = job.control_store
    if store.kind == "rocksdb":
        storage: Json = {"size": store.size, "accessModes": ["ReadWriteOnce"], "deletionPolicy": "DeleteWithCluster"}
        if store.storage_class is not None:
            storage["storageClassName"] = store.storage_class
        return {"backend": "rocksdb", "storage": storage}
    options: dict[str, Any] = {"backend": "redis", "redisAddress": store.address}
    if store.username is not None:
        options["redisUsername"] = {"valueFrom": secret_key(store.username)}
    if store.password is not None:
        options["redisPassword"] = {"valueFrom": secret_key(store.password)}
    return options
