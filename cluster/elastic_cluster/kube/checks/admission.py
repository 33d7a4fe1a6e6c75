"""What KubeRay's operator (1.7) rejects though the schema of its resources takes it, re-stated rule by rule.

Each rule is a function from one manifest to sentences that begin with the path of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_cluster.kube.checks import admission_job
from elastic_cluster.kube.checks.walk import Json, cluster_of, first_container, groups_of, templates, variable
from elastic_cluster.kube.manifests import names

Sentences = Iterator[str]

_V2_VARIABLE = "RAY_enable_autoscaler_v2"
_SIZE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
_ROCKSDB_VARIABLES = ("RAY_gcs_storage", "RAY_gcs_storage_path")


def object_names(manifest: Json) -> Sentences:
    limits = {"RayJob": names.LONGEST_NAME, "RayCluster": names.LONGEST_CLUSTER_NAME}
    kind, name = str(manifest.get("kind")), str((manifest.get("metadata") or {}).get("name", ""))
    if kind in limits and not names.is_name(name, limits[kind]):
        yield f"metadata.name: {name!r} is not a DNS-1035 label of {limits[kind]} characters at most"


def containers(manifest: Json) -> Sentences:
    for template in templates(manifest):
        if not template.spec.get("containers"):
            yield f"{template.path}.spec.containers: there must be one, for Ray"


def replicas(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    autoscaled = bool(found and found[1].get("enableInTreeAutoscaling"))
    for path, group in groups_of(manifest):
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if not autoscaled and (low is None or high is None):
            yield f"{path}: without autoscaling both minReplicas and maxReplicas must be set"
        for key, count in (("minReplicas", low), ("maxReplicas", high)):
            if count is not None and count < 0:
                yield f"{path}.{key}: {count} is negative"
        if low is not None and high is not None and low > high:
            yield f"{path}.minReplicas: {low} is above maxReplicas, which is {high}"


def resources_once(manifest: Json) -> Sentences:
    for template in templates(manifest):
        params = template.group.get("rayStartParams") or {}
        given = [key for key in _SIZE_PARAMS if params.get(key)]
        if given and template.group.get("resources"):
            where = f"{_group_path(template.path)}.resources"
            yield f"{where}: rayStartParams has {', '.join(given)} as well; use one of them"


def group_labels(manifest: Json) -> Sentences:
    for template in templates(manifest):
        path = _group_path(template.path)
        if "labels" in (template.group.get("rayStartParams") or {}):
            yield f"{path}.rayStartParams.labels: is not taken; use the group's labels"
        for key, value in (template.group.get("labels") or {}).items():
            if not names.is_label_key(key) or not names.is_label_value(value):
                yield f"{path}.labels: {key}={value} is not a label"


def restart_policy(manifest: Json) -> Sentences:
    if _version(manifest) != "v2":
        return
    for template in templates(manifest):
        policy = template.spec.get("restartPolicy")
        if template.role != "submitter" and policy not in (None, "", "Never"):
            yield f"{template.path}.spec.restartPolicy: {policy} under autoscaler v2; Never, or leave it out"


def autoscaler_version_once(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is None:
        return
    path, spec = found
    given = _head_variable(manifest, _V2_VARIABLE)
    if given is None:
        return
    if spec.get("enableInTreeAutoscaling") and (spec.get("autoscalerOptions") or {}).get("version") is not None:
        yield f"{path}.autoscalerOptions.version: the head's {_V2_VARIABLE} says it as well; use one of them"
    if not spec.get("enableInTreeAutoscaling") and given.get("value") in ("1", "true"):
        yield f"{path}.enableInTreeAutoscaling: is off, and the head's {_V2_VARIABLE} is on"


def group_suspend(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is not None and found[1].get("enableInTreeAutoscaling"):
        yield from (f"{p}.suspend: not with autoscaling" for p, group in groups_of(manifest) if group.get("suspend"))


def idle_timeout(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is None:
        return
    path, spec = found
    if ((spec.get("autoscalerOptions") or {}).get("idleTimeoutSeconds") or 0) < 0:
        yield f"{path}.autoscalerOptions.idleTimeoutSeconds: is negative"
    for place, group in groups_of(manifest):
        value = group.get("idleTimeoutSeconds")
        if value is not None and value < 0:
            yield f"{place}.idleTimeoutSeconds: {value} is negative"
        if value is not None and _version(manifest) != "v2":
            yield f"{place}.idleTimeoutSeconds: only autoscaler v2 knows it; set autoscalerOptions.version to v2"


def priority(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is None:
        return
    for path, group in groups_of(manifest):
        if group.get("priority") and not _at_least(found[1].get("rayVersion"), (2, 56)):
            yield f"{path}.priority: needs rayVersion 2.56.0 or later, not {found[1].get('rayVersion')!r}"
        if group.get("priority") and _version(manifest) != "v2":
            yield f"{path}.priority: only autoscaler v2 knows it; set autoscalerOptions.version to v2"


def fault_tolerance_once(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is None:
        return
    path, spec = found
    annotations = (manifest.get("metadata") or {}).get("annotations") or {}
    options = spec.get("gcsFaultToleranceOptions")
    if options is None:
        if _head_variable(manifest, "RAY_REDIS_ADDRESS") is not None and not annotations.get("ray.io/ft-enabled"):
            yield f"{path}.gcsFaultToleranceOptions: missing, and the head's RAY_REDIS_ADDRESS is set"
        return
    for key in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(key):
            yield f"metadata.annotations.{key}: gcsFaultToleranceOptions is set as well; use that alone"


def redis_credentials(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    if found is None:
        return
    path, spec = found
    params = (spec.get("headGroupSpec") or {}).get("rayStartParams") or {}
    if params.get("redis-username") or _head_variable(manifest, "REDIS_USERNAME") is not None:
        yield f"{path}.headGroupSpec: redis's user name belongs into gcsFaultToleranceOptions.redisUsername"
    if spec.get("gcsFaultToleranceOptions") is None:
        return
    if params.get("redis-password") or _head_variable(manifest, "REDIS_PASSWORD") is not None:
        yield f"{path}.headGroupSpec: redis's password belongs into gcsFaultToleranceOptions.redisPassword"
    if _head_variable(manifest, "RAY_REDIS_ADDRESS") is not None:
        yield f"{path}.headGroupSpec: redis's address belongs into gcsFaultToleranceOptions.redisAddress"


def fault_tolerance_backend(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    options: dict[str, Any] = (found[1].get("gcsFaultToleranceOptions") or {}) if found else {}
    if not found or not options:
        return
    path = f"{found[0]}.gcsFaultToleranceOptions"
    if options.get("backend", "redis") == "redis":
        if options.get("storage") is not None:
            yield f"{path}.storage: is for the backend rocksdb"
        return
    for key in ("redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace"):
        if options.get(key):
            yield f"{path}.{key}: is for the backend redis"
    storage = options.get("storage") or {}
    if storage.get("claimName") and any(storage.get(key) for key in ("size", "storageClassName", "accessModes")):
        yield f"{path}.storage.claimName: excludes size, storageClassName and accessModes"
    if any(_head_variable(manifest, name) is not None for name in _ROCKSDB_VARIABLES):
        yield f"{path}.backend: the head's {' and '.join(_ROCKSDB_VARIABLES)} are set by KubeRay"
    yield from _rocksdb_volume(manifest)


def _rocksdb_volume(manifest: Json) -> Sentences:
    for template in templates(manifest):
        if template.role != "head":
            continue
        for mount in first_container(template).get("volumeMounts") or []:
            if mount.get("mountPath") == "/data/gcs" or mount.get("name") == "gcs-storage":
                yield f"{template.path}.spec.containers[0].volumeMounts: /data/gcs and gcs-storage are KubeRay's"
        if any(volume.get("name") == "gcs-storage" for volume in template.spec.get("volumes") or []):
            yield f"{template.path}.spec.volumes: gcs-storage is KubeRay's"


def token_auth(manifest: Json) -> Sentences:
    found = cluster_of(manifest)
    options: dict[str, Any] = (found[1].get("authOptions") or {}) if found else {}
    if not found or not options:
        return
    path, spec = found
    if options.get("mode") == "token" and not _at_least(spec.get("rayVersion"), (2, 52)):
        yield f"{path}.rayVersion: token authentication needs 2.52.0 or later, not {spec.get('rayVersion')!r}"
    if not options.get("enableK8sTokenAuth"):
        return
    if manifest.get("kind") == "RayJob":
        yield f"{path}.authOptions.enableK8sTokenAuth: a RayJob cannot have it"
    if options.get("mode") != "token" or options.get("secretName"):
        yield f"{path}.authOptions.enableK8sTokenAuth: wants mode token and no secretName"


def _version(manifest: Json) -> str | None:
    found = cluster_of(manifest)
    if found is None or not found[1].get("enableInTreeAutoscaling"):
        return None
    version = (found[1].get("autoscalerOptions") or {}).get("version")
    return None if version is None else str(version)


def _head_variable(manifest: Json, name: str) -> Json | None:
    for template in templates(manifest):
        if template.role == "head":
            return variable(first_container(template), name)
    return None


def _group_path(path: str) -> str:
    return path.removesuffix(".template")


def _at_least(version: object, least: tuple[int, int]) -> bool:
    parts = str(version or "").split(".")
    return len(parts) >= 2 and all(p.isdigit() for p in parts[:2]) and (int(parts[0]), int(parts[1])) >= least


RULES: tuple[Callable[[Json], Sentences], ...] = (
    object_names,
    containers,
    replicas,
    resources_once,
    group_labels,
    restart_policy,
    autoscaler_version_once,
    group_suspend,
    idle_timeout,
    priority,
    fault_tolerance_once,
    redis_credentials,
    fault_tolerance_backend,
    token_auth,
    *admission_job.RULES,
)
