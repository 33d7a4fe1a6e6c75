"""Every rule catches the mistake that it exists for, and says where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from elastic_cluster.kube.checks import admission, admission_job, invariants, manifest_checks, pod_security, schema
from elastic_cluster.kube.checks.walk import templates
from elastic_cluster.kube.manifests.job import ControlStore
from elastic_cluster.kube.manifests.render import render
from kube_jobs import sample

Json = dict[str, Any]
Rule = Callable[..., Any]

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec"
HEAD_POD = f"{HEAD}.template.spec"
GROUP = f"{CLUSTER}.workerGroupSpecs[1]"
POD = f"{GROUP}.template.spec"
RAY = f"{POD}.containers[0]"
SUBMITTER = "spec.submitterPodTemplate.spec"
AUTOSCALER = f"{CLUSTER}.autoscalerOptions"
STORE = f"{CLUSTER}.gcsFaultToleranceOptions"
REMOVED = object()


def job(**changes: Any) -> Json:
    return dict(render(sample(**changes))[-1])


def mutated(manifest: Json, *changes: tuple[str, Any]) -> Json:
    """A copy with values put, appended ("path[+]") or, when REMOVED, taken away."""
    result = copy.deepcopy(manifest)
    for path, value in changes:
        where: Any = result
        *parents, last = path.replace("[", ".[").split(".")
        for part in parents:
            where = where[int(part[1:-1])] if part.startswith("[") else where.setdefault(part, {})
        if last == "[+]":
            where.append(value)
        elif value is REMOVED:
            del where[last]
        else:
            where[int(last[1:-1]) if last.startswith("[") else last] = value
    return result


def env(name: str, value: str = "1") -> Json:
    return {"name": name, "value": value}


ADMISSION: list[tuple[Rule, str, list[tuple[str, Any]]]] = [
    (admission.object_names, "metadata.name", [("metadata.name", "Gpt")]),
    (admission.object_names, "metadata.name", [("metadata.name", "g" * 48)]),
    (admission.containers, f"{POD}.containers", [(f"{POD}.containers", [])]),
    (admission.replicas, GROUP, [(f"{CLUSTER}.enableInTreeAutoscaling", False), (f"{GROUP}.minReplicas", None)]),
    (admission.replicas, f"{GROUP}.maxReplicas", [(f"{GROUP}.maxReplicas", -1)]),
    (admission.replicas, f"{GROUP}.minReplicas", [(f"{GROUP}.minReplicas", 9)]),
    (admission.resources_once, f"{CLUSTER}.workerGroupSpecs[0].resources",
     [(f"{CLUSTER}.workerGroupSpecs[0].rayStartParams.num-cpus", "1")]),
    (admission.resources_once, f"{HEAD}.resources", [(f"{HEAD}.resources", {"CPU": "0"})]),
    (admission.group_labels, f"{GROUP}.rayStartParams.labels", [(f"{GROUP}.rayStartParams.labels", "a=b")]),
    (admission.group_labels, f"{GROUP}.labels", [(f"{GROUP}.labels", {"a b": "c"})]),
    (admission.group_labels, f"{GROUP}.labels", [(f"{GROUP}.labels", {"a": "-"})]),
    (admission.restart_policy, f"{POD}.restartPolicy", [(f"{POD}.restartPolicy", "Always")]),
    (admission.restart_policy, f"{HEAD_POD}.restartPolicy", [(f"{HEAD_POD}.restartPolicy", "OnFailure")]),
    (admission.autoscaler_version_once, f"{AUTOSCALER}.version",
     [(f"{HEAD_POD}.containers[0].env[+]", env("RAY_enable_autoscaler_v2"))]),
    (admission.autoscaler_version_once, f"{CLUSTER}.enableInTreeAutoscaling",
     [(f"{CLUSTER}.enableInTreeAutoscaling", False),
      (f"{HEAD_POD}.containers[0].env[+]", env("RAY_enable_autoscaler_v2"))]),
    (admission.group_suspend, f"{GROUP}.suspend", [(f"{GROUP}.suspend", True)]),
    (admission.idle_timeout, f"{AUTOSCALER}.idleTimeoutSeconds", [(f"{AUTOSCALER}.idleTimeoutSeconds", -1)]),
    (admission.idle_timeout, f"{GROUP}.idleTimeoutSeconds", [(f"{GROUP}.idleTimeoutSeconds", -1)]),
    (admission.idle_timeout, f"{GROUP}.idleTimeoutSeconds", [(f"{AUTOSCALER}.version", "v1")]),
    (admission.priority, f"{GROUP}.priority", [(f"{CLUSTER}.rayVersion", "2.55.1")]),
    (admission.priority, f"{GROUP}.priority", [(f"{AUTOSCALER}.version", "v1")]),
    (admission.fault_tolerance_once, "metadata.annotations", [("metadata.annotations", {"ray.io/ft-enabled": "true"})]),
    (admission.fault_tolerance_once, "metadata.annotations",
     [("metadata.annotations", {"ray.io/external-storage-namespace": "a"})]),
    (admission.fault_tolerance_once, STORE,
     [(STORE, REMOVED), (f"{HEAD_POD}.containers[0].env[+]", env("RAY_REDIS_ADDRESS"))]),
    (admission.redis_credentials, HEAD, [(f"{HEAD}.rayStartParams.redis-username", "me")]),
    (admission.redis_credentials, HEAD, [(f"{HEAD}.rayStartParams.redis-password", "x")]),
    (admission.redis_credentials, HEAD, [(f"{HEAD_POD}.containers[0].env[+]", env("REDIS_USERNAME"))]),
    (admission.redis_credentials, HEAD, [(f"{HEAD_POD}.containers[0].env[+]", env("REDIS_PASSWORD"))]),
    (admission.redis_credentials, HEAD, [(f"{HEAD_POD}.containers[0].env[+]", env("RAY_REDIS_ADDRESS"))]),
    (admission.fault_tolerance_backend, f"{STORE}.storage", [(f"{STORE}.storage", {"size": "1Gi"})]),
    (admission.fault_tolerance_backend, f"{STORE}.redisAddress", [(f"{STORE}.backend", "rocksdb")]),
    (admission.token_auth, f"{CLUSTER}.rayVersion", [(f"{CLUSTER}.rayVersion", REMOVED)]),
    (admission.token_auth, f"{CLUSTER}.rayVersion", [(f"{CLUSTER}.rayVersion", "2.51.9")]),
    (admission.token_auth, f"{CLUSTER}.authOptions.enableK8sTokenAuth",
     [(f"{CLUSTER}.authOptions.enableK8sTokenAuth", True)]),
    (admission_job.job_lifetime, "spec.suspend", [("spec.suspend", True), ("spec.shutdownAfterJobFinishes", False)]),
    (admission_job.job_lifetime, "spec.ttlSecondsAfterFinished", [("spec.shutdownAfterJobFinishes", False)]),
    (admission_job.job_lifetime, "spec.ttlSecondsAfterFinished", [("spec.ttlSecondsAfterFinished", -1)]),
    (admission_job.job_lifetime, "spec.activeDeadlineSeconds", [("spec.activeDeadlineSeconds", 0)]),
    (admission_job.job_lifetime, "spec.backoffLimit", [("spec.backoffLimit", -1)]),
    (admission_job.job_cluster, "spec:", [(CLUSTER, REMOVED)]),
    (admission_job.job_cluster, "spec.backoffLimit", [("spec.clusterSelector", {"ray.io/cluster": "a"})]),
    (admission_job.job_cluster, "spec.suspend",
     [("spec.clusterSelector", {"ray.io/cluster": "a"}), ("spec.suspend", True)]),
    (admission_job.job_cluster, "spec.backoffLimit", [("spec.submissionMode", "InteractiveMode")]),
    (admission_job.job_cluster, "spec.submitterPodTemplate", [("spec.submissionMode", "SidecarMode")]),
    (admission_job.runtime_env, "spec.runtimeEnvYAML", [("spec.runtimeEnvYAML", "- a: [")]),
    (admission_job.runtime_env, "spec.runtimeEnvYAML", [("spec.runtimeEnvYAML", "just text")]),
]  # fmt: skip

_SECURITY = f"{RAY}.securityContext"
RESTRICTED: list[tuple[Rule, str, list[tuple[str, Any]]]] = [
    (pod_security.host, f"{POD}.hostNetwork", [(f"{POD}.hostNetwork", True)]),
    (pod_security.host, f"{POD}.hostPID", [(f"{POD}.hostPID", True)]),
    (pod_security.host, f"{POD}.hostIPC", [(f"{POD}.hostIPC", True)]),
    (pod_security.host, f"{RAY}.ports", [(f"{RAY}.ports", [{"containerPort": 1, "hostPort": 1}])]),
    (pod_security.volumes, f"{POD}.volumes[2].hostPath",
     [(f"{POD}.volumes[+]", {"name": "x", "hostPath": {"path": "/"}})]),
    (pod_security.privileged, f"{_SECURITY}.privileged", [(f"{_SECURITY}.privileged", True)]),
    (pod_security.privileged, f"{_SECURITY}.procMount", [(f"{_SECURITY}.procMount", "Unmasked")]),
    (pod_security.escalation, f"{_SECURITY}.allowPrivilegeEscalation",
     [(f"{_SECURITY}.allowPrivilegeEscalation", REMOVED)]),
    (pod_security.escalation, f"{AUTOSCALER}.spec.containers[0].securityContext",
     [(f"{AUTOSCALER}.securityContext", REMOVED)]),
    (pod_security.capabilities, f"{_SECURITY}.capabilities.drop", [(f"{_SECURITY}.capabilities.drop", ["NET_RAW"])]),
    (pod_security.capabilities, f"{_SECURITY}.capabilities.add", [(f"{_SECURITY}.capabilities.add", ["SYS_ADMIN"])]),
    (pod_security.not_root, f"{_SECURITY}.runAsNonRoot", [(f"{_SECURITY}.runAsNonRoot", False)]),
    (pod_security.not_root, f"{_SECURITY}.runAsUser", [(f"{_SECURITY}.runAsUser", 0)]),
    (pod_security.not_root, f"{_SECURITY}.runAsUser", [(f"{POD}.securityContext.runAsUser", 0)]),
    (pod_security.not_root, SUBMITTER,
     [(f"{SUBMITTER}.securityContext", REMOVED), (f"{SUBMITTER}.containers[0].securityContext.runAsNonRoot", REMOVED)]),
    (pod_security.seccomp, f"{_SECURITY}.seccompProfile", [(f"{_SECURITY}.seccompProfile.type", "Unconfined")]),
    (pod_security.seccomp, f"{_SECURITY}.seccompProfile",
     [(f"{_SECURITY}.seccompProfile", REMOVED), (f"{POD}.securityContext.seccompProfile", REMOVED)]),
    (pod_security.kernel, f"{POD}.securityContext.sysctls",
     [(f"{POD}.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}])]),
    (pod_security.kernel, f"{_SECURITY}.appArmorProfile", [(f"{_SECURITY}.appArmorProfile", {"type": "Unconfined"})]),
    (pod_security.kernel, f"{_SECURITY}.seLinuxOptions", [(f"{_SECURITY}.seLinuxOptions", {"user": "root"})]),
    (pod_security.kernel, f"{_SECURITY}.windowsOptions", [(f"{_SECURITY}.windowsOptions", {"hostProcess": True})]),
]  # fmt: skip

_TOLD = f"{RAY}.env"
OUR_OWN: list[tuple[Rule, str, list[tuple[str, Any]]]] = [
    (invariants.autoscaler, f"{CLUSTER}.enableInTreeAutoscaling", [(f"{CLUSTER}.enableInTreeAutoscaling", False)]),
    (invariants.autoscaler, f"{AUTOSCALER}.version", [(f"{AUTOSCALER}.version", REMOVED)]),
    (invariants.authentication, f"{CLUSTER}.authOptions.mode", [(f"{CLUSTER}.authOptions", REMOVED)]),
    (invariants.literal_credentials, f"{RAY}.env.HF_TOKEN", [(f"{RAY}.env[+]", env("HF_TOKEN", "x"))]),
    (invariants.literal_credentials, f"{STORE}.redisPassword", [(f"{STORE}.redisPassword", {"value": "x"})]),
    (invariants.accelerators, f"{RAY}.resources", [(f"{RAY}.resources.requests", {"cpu": "8", "memory": "64Gi"})]),
    (invariants.accelerators, f"{RAY}.resources.limits.nvidia.com/gpu",
     [(f"{RAY}.resources", {key: {"memory": "64Gi", "nvidia.com/gpu": "500m"} for key in ("requests", "limits")})]),
    (invariants.memory, f"{RAY}.resources", [(f"{RAY}.resources.requests.memory", "1Gi")]),
    (invariants.shared_memory, f"{POD}.volumes", [(f"{POD}.volumes[0].emptyDir", {"medium": "Memory"})]),
    (invariants.shared_memory, f"{POD}.volumes", [(f"{POD}.volumes[0].emptyDir.medium", REMOVED)]),
    (invariants.shared_memory, f"{POD}.volumes", [(f"{POD}.volumes[0].emptyDir.sizeLimit", "64Gi")]),
    (invariants.shared_memory, f"{GROUP}.template", [(f"{GROUP}.rayStartParams.object-store-memory", "17179869185")]),
    (invariants.drain, f"{POD}.terminationGracePeriodSeconds", [(f"{POD}.terminationGracePeriodSeconds", 25)]),
    (invariants.drain, f"{POD}.terminationGracePeriodSeconds",
     [(f"{POD}.terminationGracePeriodSeconds", REMOVED),
      (_TOLD, [env("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "30")])]),
    (invariants.drain, f"{RAY}.env", [(_TOLD, [])]),
    (invariants.drain, f"{RAY}.env", [(_TOLD, [env("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")])]),
    (invariants.drain, f"{RAY}.args", [("metadata.annotations", {})]),
    (invariants.drain, f"{RAY}.args", [(f"{RAY}.args", ["$KUBERAY_GEN_RAY_START_CMD"])]),
    (invariants.head_outlasts_workers, HEAD, [(f"{HEAD_POD}.terminationGracePeriodSeconds", 30)]),
    (invariants.accounts, f"{POD}.automountServiceAccountToken", [(f"{POD}.automountServiceAccountToken", REMOVED)]),
    (invariants.accounts, f"{SUBMITTER}.automount", [(f"{SUBMITTER}.automountServiceAccountToken", True)]),
    (invariants.controller, f"{HEAD}.rayStartParams.num-cpus", [(f"{HEAD}.rayStartParams.num-cpus", "2")]),
    (invariants.controller, f"{CLUSTER}.workerGroupSpecs", [(f"{CLUSTER}.workerGroupSpecs[0].maxReplicas", 2)]),
    (invariants.controller, f"{CLUSTER}.workerGroupSpecs", [(f"{CLUSTER}.workerGroupSpecs[0].resources.CPU", "1")]),
    (invariants.ownership, "metadata.labels", [("metadata.labels", {})]),
    (invariants.idle_timeout, f"{GROUP}.idleTimeoutSeconds", [(f"{GROUP}.idleTimeoutSeconds", 300)]),
    (invariants.idle_timeout, f"{AUTOSCALER}.idleTimeoutSeconds", [(f"{AUTOSCALER}.idleTimeoutSeconds", 10)]),
]  # fmt: skip


def ids(table: list[tuple[Rule, str, list[tuple[str, Any]]]]) -> Any:
    return [f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(table)]


def run(rule: Rule, manifest: Json) -> list[str]:
    if rule.__module__ == pod_security.__name__:
        places = [*templates(manifest), *pod_security._autoscaler(manifest)]
        return [text for template in places for text in rule(template)]
    return list(rule(manifest, 300) if rule is invariants.idle_timeout else rule(manifest))


@pytest.mark.parametrize(
    ("rule", "path", "changes"), [*ADMISSION, *RESTRICTED, *OUR_OWN], ids=ids([*ADMISSION, *RESTRICTED, *OUR_OWN])
)
def test_a_mistake_is_found_where_it_is(rule: Rule, path: str, changes: list[tuple[str, Any]]) -> None:
    clean = job()
    assert run(rule, clean) == []
    found = run(rule, mutated(clean, *changes))
    assert any(text.startswith(path) for text in found), found
    assert all(": " in text for text in found), "where, and what"


@pytest.mark.parametrize(
    ("rules", "table"),
    [
        (admission.RULES, ADMISSION),
        (pod_security.RULES, RESTRICTED),
        ((*invariants.RULES, invariants.idle_timeout), OUR_OWN),
    ],
    ids=["admission", "restricted", "ours"],
)
def test_every_rule_is_tried(rules: tuple[Rule, ...], table: list[tuple[Rule, str, list[tuple[str, Any]]]]) -> None:
    assert {rule.__name__ for rule in rules} == {rule.__name__ for rule, _, _ in table}


ROCKSDB = ControlStore("rocksdb")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (f"{STORE}.externalStorageNamespace", (f"{STORE}.externalStorageNamespace", "a")),
        (f"{STORE}.storage.claimName", (f"{STORE}.storage.claimName", "a")),
        (f"{STORE}.backend", (f"{HEAD_POD}.containers[0].env[+]", env("RAY_gcs_storage", "rocksdb"))),
        (f"{HEAD_POD}.containers[0].volumeMounts",
         (f"{HEAD_POD}.containers[0].volumeMounts[+]", {"name": "x", "mountPath": "/data/gcs"})),
        (f"{HEAD_POD}.volumes", (f"{HEAD_POD}.volumes[+]", {"name": "gcs-storage", "emptyDir": {}})),
    ],
)  # fmt: skip
def test_what_only_rocksdb_does_not_take(path: str, change: tuple[str, Any]) -> None:
    clean = job(control_store=ROCKSDB)
    assert run(admission.fault_tolerance_backend, clean) == []
    assert [text.partition(":")[0] for text in run(admission.fault_tolerance_backend, mutated(clean, change))] == [path]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("spec.backofLimit", [("spec.backofLimit", 1)]),
        (f"{POD}.tolerations[0]", [(f"{POD}.tolerations", [{"key": "a", "efect": "NoSchedule"}])]),
        (f"{GROUP}.minReplicas", [(f"{GROUP}.minReplicas", "1")]),
        (f"{STORE}.backend", [(f"{STORE}.backend", "etcd")]),
        (GROUP, [(f"{GROUP}.groupName", REMOVED)]),
        (f"{RAY}.resources.limits.memory", [(f"{RAY}.resources.limits.memory", "64GB")]),
        (f"{CLUSTER}.authOptions.mode", [(f"{CLUSTER}.authOptions.mode", "none")]),
    ],
)
def test_what_the_schema_does_not_take(path: str, changes: list[tuple[str, Any]]) -> None:
    assert list(schema.problems(job())) == []
    (found,) = schema.problems(mutated(job(), *changes))
    assert path.rpartition(".")[2] in found
    assert found.startswith(path) or found.startswith(path.rpartition(".")[0])


def test_findings_name_the_object() -> None:
    manifests = render(sample())
    manifests[-1] = mutated(manifests[-1], (f"{GROUP}.suspend", True))
    assert manifest_checks.problems(manifests) == [f"RayJob gpt: {GROUP}.suspend: not with autoscaling"]
    manifests[0] = mutated(manifests[0], ("metadata.labels", {}))
    assert manifest_checks.problems(manifests)[0].startswith("ConfigMap gpt-files: metadata.labels")


def test_the_schemas_are_those_of_the_release_that_the_rules_are_of() -> None:
    for kind in ("RayJob", "RayCluster"):
        document = schema.definition(kind)
        assert document["kind"] == kind
        assert document["source"] == "ray-project/kuberay v1.7.0 (Apache-2.0)"
