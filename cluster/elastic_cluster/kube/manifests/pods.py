"""Pod templates: Ray's container, its permissions (Pod Security `restricted`), and its termination."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from elastic_cluster.kube.manifests import labels, names, quantity
from elastic_cluster.kube.manifests.job import KubeJob, Place, SecretRef, Size

Json = dict[str, Any]

# After its drain Ray still ends its processes; the kubelet kills what is left when the grace period is over.
SHUTDOWN_S = 20
# Ray's share of /dev/shm for objects: the rest is for collectives, which keep their buffers there as well.
_OBJECT_STORE_SHARE = Decimal("0.75")
_SHM_SHARE = Decimal("0.25")

# Ray itself must be the first process of the container, for only that one gets SIGTERM, which is how a node learns that
# it is to drain. A shell in its place may pass nothing on (a login shell, which the operator can be set to use, does
# not), so it is replaced. `eval`, because the command that KubeRay generates holds quotes and variables.
_START = 'ulimit -n "${RAY_START_ULIMIT_OPEN_FILES:-65536}"; eval "exec $KUBERAY_GEN_RAY_START_CMD"'


def container_security() -> Json:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def ray_pod(
    job: KubeJob, size: Size, place: Place, *, drain_s: int, zone: bool = True, user: bool = True, files: bool = False
) -> Json:
    """The template of a head or worker pod. `user` code runs in it and has the job's variables, secrets and volumes;
    `zone` asks the machine where it stands; `files` puts the job's files there.
    """
    volumes, mounts = _volumes(job, size, user, files)
    container: Json = {
        "name": "ray",
        "image": job.image,
        "imagePullPolicy": job.pull_policy,
        "command": ["/bin/bash", "-c", "--"],
        "args": [_START],
        "env": [*(_env(job.env) if user else []), *_node_env(drain_s, zone)],
        "resources": resources(size),
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }
    spec = {**_common(job), **_placed(place), "containers": [container], "volumes": volumes}
    spec["terminationGracePeriodSeconds"] = drain_s + SHUTDOWN_S
    return {"metadata": {"labels": labels.labels(job.run_id)}, "spec": spec}


def submitter_pod(job: KubeJob) -> Json:
    """The pod that hands the command to the cluster and shows its log. KubeRay adds command and token."""
    container: Json = {
        "name": "ray-job-submitter",
        "image": job.image,
        "imagePullPolicy": job.pull_policy,
        "resources": resources(Size("500m", "1Gi")),
        "securityContext": container_security(),
    }
    spec = {**_common(job), **_placed(job.head_place), "containers": [container]}
    spec |= {"restartPolicy": "Never", "automountServiceAccountToken": False}
    return {"metadata": {"labels": labels.labels(job.run_id)}, "spec": spec}


def resources(size: Size) -> Json:
    """Requests equal limits: a pod that was promised less than it uses is the first to be killed."""
    amounts: Json = {"cpu": size.cpu, "memory": size.memory}
    amounts |= {name: str(count) for name, count in sorted(size.accelerators.items())}
    return {"requests": dict(amounts), "limits": dict(amounts)}


def shm_bytes(size: Size) -> int:
    """Of /dev/shm: as given, else a quarter of the memory."""
    return quantity.whole(size.shm) if size.shm is not None else int(quantity.parse(size.memory) * _SHM_SHARE)


def object_store_bytes(size: Size) -> int:
    """Told to Ray, which would otherwise take a share of the pod's memory that may be larger than /dev/shm."""
    return int(shm_bytes(size) * _OBJECT_STORE_SHARE)


def _common(job: KubeJob) -> Json:
    spec: Json = {
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.run_as_user,
            "runAsGroup": job.run_as_user,
            "fsGroup": job.run_as_user,
            # A volume with millions of files would otherwise be walked through at the start of every pod.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if job.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in job.pull_secrets]
    return spec


def _placed(place: Place) -> Json:
    spec: Json = {}
    if place.node_selector:
        spec["nodeSelector"] = dict(sorted(place.node_selector.items()))
    if place.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in place.tolerations]
    return spec


def _volumes(job: KubeJob, size: Size, user: bool, files: bool) -> tuple[list[Json], list[Json]]:
    shm = {"medium": "Memory", "sizeLimit": str(shm_bytes(size))}
    volumes: list[Json] = [{"name": "shared-mem", "emptyDir": shm}]
    mounts: list[Json] = [{"name": "shared-mem", "mountPath": "/dev/shm"}]
    for index, volume in enumerate(job.volumes if user else ()):
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        volumes.append({"name": f"volume-{index}", "persistentVolumeClaim": claim})
        mounts.append({"name": f"volume-{index}", "mountPath": volume.mount, "readOnly": volume.read_only})
    if files and job.files:
        volumes.append({"name": "files", "configMap": {"name": f"{job.name}-files"}})
        mounts += [
            # One file of its folder, so that what the image has next to it stays.
            {"name": "files", "mountPath": path, "subPath": file_key(path), "readOnly": True}
            for path in sorted(job.files)
        ]
    return volumes, mounts


def file_key(path: str) -> str:
    """The key of a file in the ConfigMap: "/app/job.yaml" becomes "app.job.yaml"."""
    return path.strip("/").replace("/", ".")


def _env(env: Mapping[str, str | SecretRef]) -> list[Json]:
    return [variable(name, value) for name, value in sorted(env.items())]


def variable(name: str, value: str | SecretRef) -> Json:
    if isinstance(value, SecretRef):
        return {"name": name, "valueFrom": secret_key(value)}
    return {"name": name, "value": value}


def secret_key(ref: SecretRef) -> Json:
    return {"secretKeyRef": {"name": ref.name, "key": ref.key}}


def _node_env(drain_s: int, zone: bool) -> list[Json]:
    env: list[Json] = [{"name": names.DRAIN_VARIABLE, "value": str(drain_s)}]
    if zone:
        # Kubernetes 1.35 and later copy these labels from the machine to the pod. Where they do not, the variables are
        # empty, which Ray takes as unknown.
        env += [
            _label_variable("RAY_NODE_REGION", names.NODE_REGION),
            _label_variable("RAY_NODE_ZONE", names.NODE_ZONE),
        ]
    return env


def _label_variable(name: str, label: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
