"""Whatever job is valid becomes manifests to which schema, operator, Pod Security and we ourselves do not object."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml
from elastic_cluster.kube.checks.job_rules import refusals
from elastic_cluster.kube.checks.manifest_checks import problems
from elastic_cluster.kube.checks.walk import cluster_of, templates
from elastic_cluster.kube.manifests import names
from elastic_cluster.kube.manifests.job import KubeJob, SecretRef
from elastic_cluster.kube.manifests.labels import run_of, selector
from elastic_cluster.kube.manifests.render import render
from elastic_jobs.commands.kube.render import as_yaml
from hypothesis import given, settings
from kube_jobs import jobs, sample

Json = dict[str, Any]


@settings(max_examples=20)
@given(jobs())
def test_a_valid_job_gives_manifests_that_nobody_objects_to(job: KubeJob) -> None:
    assert refusals(job) == []
    manifests = render(job)
    assert problems(manifests, job.node_start_s) == []
    assert render(job) == manifests, "twice the same"
    assert {run_of(manifest) for manifest in manifests} == {job.run_id}
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {job.namespace}


@settings(max_examples=8)
@given(jobs())
def test_what_is_printed_is_what_was_checked(job: KubeJob) -> None:
    assert list(yaml.safe_load_all(as_yaml(render(job)))) == render(job)


@settings(max_examples=20)
@given(jobs())
def test_a_preemption_notice_has_the_time_that_it_promises(job: KubeJob) -> None:
    grace = {template.role: template.spec["terminationGracePeriodSeconds"] for template in templates(top(job))
             if template.role != "submitter"}  # fmt: skip
    assert grace["head"] >= max(group.drain_s for group in job.groups) + 20
    for group, told in zip(job.groups, groups(job)[1:], strict=True):
        spec = told["template"]["spec"]
        assert variables(spec)[names.DRAIN_VARIABLE] == str(group.drain_s)
        assert spec["terminationGracePeriodSeconds"] > group.drain_s


def top(job: KubeJob) -> Json:
    return render(job)[-1]


def cluster(job: KubeJob) -> Json:
    found = cluster_of(top(job))
    assert found is not None
    return dict(found[1])


def groups(job: KubeJob) -> list[Json]:
    found: list[Json] = cluster(job)["workerGroupSpecs"]
    return found


def variables(spec: Json) -> Json:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in spec["containers"][0]["env"]}


def kinds(job: KubeJob) -> list[str]:
    return [f"{manifest['kind']} {manifest['metadata']['name']}" for manifest in render(job)]


def test_a_job_and_a_cluster() -> None:
    policies = ["NetworkPolicy gpt", "NetworkPolicy gpt-head"]
    assert kinds(sample()) == ["ConfigMap gpt-files", "ServiceAccount gpt-worker", *policies, "RayJob gpt"]
    assert kinds(sample(as_cluster=True)) == [
        "ServiceAccount gpt-worker", "ServiceAccount gpt-head", "Role gpt", "RoleBinding gpt", *policies,
        "RayCluster gpt",
    ]  # fmt: skip
    assert kinds(sample(rbac=False, network=None, files={})) == ["RayJob gpt"]
    assert cluster(sample()) | {"headGroupSpec": 0, "workerGroupSpecs": 0} == cluster(sample(as_cluster=True)) | {
        "headGroupSpec": 0, "workerGroupSpecs": 0,
    }  # fmt: skip


def test_the_command_is_started_where_no_worker_is_and_not_on_the_head() -> None:
    job = sample(command=("exec", "python", "/app/a job.yaml"))
    spec = top(job)["spec"]
    assert shlex.split(spec["entrypoint"]) == list(job.command)
    (name,) = json.loads(spec["entrypointResources"])
    having = [group for group in groups(job) if name in group.get("resources", {})]
    assert [(group["groupName"], group["minReplicas"], group["maxReplicas"]) for group in having] == [
        ("controller", 1, 1)
    ]
    assert having[0]["resources"]["CPU"] == "0"
    assert cluster(job)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    mounted = [g["groupName"] for g in groups(job) if "/app/job.yaml" in str(g["template"]["spec"]["containers"])]
    assert mounted == ["controller"]


def test_spot_and_on_demand_groups() -> None:
    _, spot, steady = groups(sample())
    assert (spot["priority"], spot["labels"]["ray.io/market-type"], spot["minReplicas"], spot["maxReplicas"]) == (
        10, "spot", 0, 8,
    )  # fmt: skip
    assert (steady["priority"], steady["labels"]["ray.io/market-type"], steady["numOfHosts"]) == (0, "on-demand", 2)
    assert spot["template"]["spec"]["nodeSelector"] == {"pool": "spot"}
    assert spot["template"]["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]
    resources = spot["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"}


def test_the_failure_domain_of_a_machine_reaches_ray() -> None:
    _, spot, steady = groups(sample())
    asked = variables(spot["template"]["spec"])["RAY_NODE_ZONE"]
    assert asked == {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}}
    # A group that is bound to a zone says so itself, which needs no help from Kubernetes.
    assert steady["labels"]["ray.io/availability-zone"] == "eu-west-1a"
    assert steady["template"]["spec"]["nodeSelector"] == {"topology.kubernetes.io/zone": "eu-west-1a"}
    assert "RAY_NODE_ZONE" not in variables(steady["template"]["spec"])


def test_what_user_code_does_not_need_it_does_not_get() -> None:
    for group in groups(sample()):
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["serviceAccountName"] == "gpt-worker"
    head = cluster(sample())["headGroupSpec"]["template"]["spec"]
    assert "AWS_SECRET_ACCESS_KEY" not in variables(head), "nothing of the run is on the head"
    assert "serviceAccountName" not in head, "the operator makes one, by a name that nobody knows beforehand"
    assert cluster(sample(as_cluster=True))["headGroupSpec"]["template"]["spec"]["serviceAccountName"] == "gpt-head"


def test_an_account_with_a_role_in_the_cloud_takes_the_place_of_ours() -> None:
    job = sample(service_account="trainer")
    assert "ServiceAccount gpt-worker" not in kinds(job)
    for group in groups(job):
        assert group["template"]["spec"]["serviceAccountName"] == "trainer"
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


def test_a_job_that_is_stopped_has_the_time_to_save() -> None:
    env = yaml.safe_load(top(sample(stop_s=123))["spec"]["runtimeEnvYAML"])["env_vars"]
    assert env == {"RAY_JOB_STOP_WAIT_TIME_S": "123"}


def test_the_role_is_for_one_cluster() -> None:
    (role,) = (manifest for manifest in render(sample(as_cluster=True)) if manifest["kind"] == "Role")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["ray.io"], "resources": ["rayclusters"], "resourceNames": ["gpt"], "verbs": ["get", "patch"]},
    ]


def test_pods_reach_each_other_dns_and_what_is_named() -> None:
    everyone, head = (manifest["spec"] for manifest in render(sample()) if manifest["kind"] == "NetworkPolicy")
    own = {"podSelector": {"matchLabels": dict(pair.split("=") for pair in selector("gpt").split(","))}}
    assert everyone["podSelector"] == own["podSelector"]
    assert everyone["policyTypes"] == head["policyTypes"] == ["Ingress", "Egress"]
    assert everyone["ingress"] == [{"from": [own]}]
    to = [rule["to"] for rule in everyone["egress"]]
    assert to[0] == [own]
    assert [port["port"] for port in everyone["egress"][1]["ports"]] == [53, 53]
    assert to[2] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert [port["port"] for port in everyone["egress"][2]["ports"]] == [443, 6379]
    assert len(to) == 3
    assert head["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    assert [rule["to"] for rule in head["egress"]] == [[{"ipBlock": {"cidr": "10.96.0.1/32"}}]]
    (asking,) = head["ingress"]
    assert asking["ports"] == [{"protocol": "TCP", "port": 8265}]
    for template in templates(top(sample())):
        path = template.path.removesuffix(".spec")
        assert own["podSelector"]["matchLabels"].items() <= dig(top(sample()), path)["metadata"]["labels"].items()


def dig(manifest: Json, path: str) -> Json:
    found: Any = manifest
    for part in path.replace("[", ".").replace("]", "").split("."):
        found = found[int(part)] if part.isdigit() else found[part]
    return dict(found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "rocksdb", "size": "5Gi", "storage_class": "fast"},
         {"backend": "rocksdb", "storage": {"size": "5Gi", "accessModes": ["ReadWriteOnce"],
          "deletionPolicy": "DeleteWithCluster", "storageClassName": "fast"}}),
        ({"kind": "redis", "address": "r:1", "username": SecretRef("s", "user"), "password": SecretRef("s", "pass")},
         {"backend": "redis", "redisAddress": "r:1",
          "redisUsername": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "user"}}},
          "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "pass"}}}}),
        ({"kind": "none"}, None),
    ],
)  # fmt: skip
def test_where_the_control_store_keeps_its_tables(changes: Json, expected: Json | None) -> None:
    from elastic_cluster.kube.manifests.job import ControlStore

    job = sample(control_store=ControlStore(**changes))
    assert cluster(job).get("gcsFaultToleranceOptions") == expected


def test_the_token_is_made_by_the_operator_unless_a_secret_is_named() -> None:
    assert cluster(sample())["authOptions"] == {"mode": "token"}
    assert cluster(sample(token_secret="mine"))["authOptions"] == {"mode": "token", "secretName": "mine"}


def test_kueue() -> None:
    about = top(sample())["metadata"]
    assert about["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert about["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert "kueue" not in json.dumps(top(sample(queue=None)))


def test_nothing_of_a_secret_but_its_name_is_written() -> None:
    job = replace(sample(), env={"PASSWORD": SecretRef("s3", "secret")})
    for group in groups(job):
        value = variables(group["template"]["spec"])["PASSWORD"]
        assert value == {"secretKeyRef": {"name": "s3", "key": "secret"}}
