"""What the objects of a run say about it: one word, one sentence, no success that is none."""

from __future__ import annotations

from typing import Any

import pytest
from elastic_cluster.kube.client.secrets import SecretUse, redacted, uses
from elastic_cluster.kube.client.status import pod_status, run_status
from kube_samples import ray_cluster, ray_job


def job(**status: Any) -> dict[str, Any]:
    return {**ray_job(), "status": status}


@pytest.mark.parametrize(
    ("deployment", "verdict", "state", "over"),
    [
        ("", "", "pending", False),
        ("Initializing", "", "starting", False),
        ("Waiting", "", "starting", False),
        ("Running", "PENDING", "running", False),
        ("Running", "RUNNING", "running", False),
        # Ray's verdict is there, and the operator's is not: it may still try again.
        ("Running", "FAILED", "running", False),
        ("Running", "SUCCEEDED", "running", False),
        ("Retrying", "FAILED", "retrying", False),
        ("Suspended", "", "suspended", False),
        ("Complete", "SUCCEEDED", "finished", True),
        ("Complete", "STOPPED", "stopped", True),
        # Complete, and nobody says how.
        ("Complete", "", "failed", True),
        ("Failed", "FAILED", "failed", True),
        ("Failed", "", "failed", True),
        ("Failed", "SUCCEEDED", "failed", True),
        ("ValidationFailed", "", "refused", True),
        ("SomethingNew", "SUCCEEDED", "pending", False),
    ],
)
def test_a_run_is_over_only_when_the_operator_says_so(deployment: str, verdict: str, state: str, over: bool) -> None:
    status = run_status(job(jobDeploymentStatus=deployment, jobStatus=verdict))
    assert (status.state, status.over) == (state, over)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Job entrypoint command failed with exit code 104, last available logs (truncated to 20,000 chars):\nx", 104),
        ("Job entrypoint command failed with exit code -9. No logs available.", -9),
        # What follows the beginning is the job's own text.
        ("x\nJob entrypoint command failed with exit code 0", None),
        ("", None),
    ],
)
def test_the_drivers_exit_code_is_rays_and_not_what_the_job_prints(message: str, code: int | None) -> None:
    status = run_status(job(jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed", message=message))
    assert status.exit_code == code
    assert "\n" not in status.reason
    assert status.reason.startswith("AppFailed")


def test_a_cluster_without_a_job() -> None:
    cluster = {**ray_cluster(), "status": {"state": "ready", "readyWorkerReplicas": 2, "desiredWorkerReplicas": 3}}
    status = run_status(cluster)
    assert (status.kind, status.state, status.workers) == ("RayCluster", "running", (2, 3, 0))
    assert run_status({**cluster, "metadata": {**cluster["metadata"], "deletionTimestamp": "x"}}).state == "deleting"


def pod(phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "labels": {"ray.io/group": "spot"}}, "status": {"phase": phase, **status}}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "ray", "state": state}]}


UNSCHEDULED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (pod("Pending"), ""),
        (pod("Pending", conditions=UNSCHEDULED), "Unschedulable: no node"),
        (pod("Running", conditions=UNSCHEDULED), ""),
        (pod("Pending", **container(waiting={"reason": "ContainerCreating"})), ""),
        (pod("Pending", **container(waiting={"reason": "ImagePullBackOff"})), "ImagePullBackOff"),
        (
            pod("Running", **container(terminated={"exitCode": 137, "reason": "OOMKilled"})),
            "ray ended with OOMKilled 137",
        ),
        (pod("Failed", reason="Evicted"), "Evicted"),
    ],
)
def test_why_a_pod_does_not_run(found: dict[str, Any], problem: str) -> None:
    assert pod_status(found).problem == problem


def test_what_is_secret_is_hidden_and_what_refers_to_it_is_not() -> None:
    reference = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key"}}}
    manifest = {
        "kind": "RayJob",
        "metadata": {"annotations": {"a": "b", "kubectl.kubernetes.io/last-applied-configuration": "hunter2"}},
        "spec": {
            "runtimeEnvYAML": "env_vars: {A: hunter2}",
            "containers": [{"name": "ray", "env": [{"name": "A", "value": "hunter2"}, reference]}],
        },
    }
    shown = redacted([manifest, {"kind": "Secret", "data": {"a": "hunter2"}, "stringData": {"b": "hunter2"}}])
    assert "hunter2" not in str(shown)
    assert shown[0]["spec"]["containers"] == [{"name": "ray", "env": [{"name": "A", "value": "***"}, reference]}]
    assert shown[0]["metadata"]["annotations"]["a"] == "b"
    assert shown[1] == {"kind": "Secret", "data": {"a": "***"}, "stringData": {"b": "***"}}
    assert manifest["spec"]["runtimeEnvYAML"] == "env_vars: {A: hunter2}"


def test_every_secret_that_a_pod_needs_is_found() -> None:
    own = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own"}}
    spec = {
        "authOptions": {"mode": "token", "secretName": "token"},
        "imagePullSecrets": [{"name": "pull"}],
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "env", "key": "a"}}},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "maybe", "key": "a", "optional": True}}},
            {"name": "C", "valueFrom": {"secretKeyRef": {"name": "own", "key": "a"}}},
            {"name": "D", "valueFrom": {"secretKeyRef": {"name": "token", "key": "auth_token"}}},
        ],
        "envFrom": [{"secretRef": {"name": "from"}}],
        "volumes": [{"name": "v", "secret": {"secretName": "volume"}}],
    }
    found = uses([{**ray_job(), "spec": spec}, own])
    assert found == [
        SecretUse("env"),
        SecretUse("from"),
        SecretUse("pull"),
        SecretUse("token", True),
        SecretUse("volume"),
    ]
