"""Applying, looking at and deleting runs, over real HTTP against a fake Kubernetes API server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from elastic_cluster.kube.client import runs
from elastic_cluster.kube.client.api import Limits, Ref
from elastic_cluster.kube.client.apply import apply_run
from elastic_cluster.kube.client.errors import KubeDenied, KubeError, KubeNotFound, KubeQuota, KubeRefused
from elastic_cluster.kube.client.official import OfficialClient
from elastic_cluster.kube.client.runs import delete_run, find_runs, look
from elastic_cluster.kube.manifests.labels import labels, selector
from kube_fake import FakeKubeRay, FakeKubernetes, Refusal
from kube_fake.request import Fault
from kube_samples import connected, network_policy, ray_cluster, ray_job


@dataclass
class World:
    kubernetes: FakeKubernetes
    client: OfficialClient
    operator: FakeKubeRay

    def apply(self, *manifests: dict[str, Any], **more: Any) -> dict[str, str]:
        applied = apply_run(self.client, "gpt", list(manifests), **more)
        return {f"{each.ref.kind}/{each.ref.name}": each.outcome for each in applied}

    def delete(self, run_id: str = "gpt", limit_s: float = 20.0, **more: Any) -> tuple[list[str], tuple[str, ...]]:
        def said(sentence: str) -> None:
            self.operator.reconcile()

        deleted = delete_run(self.client, run_id, "team", limit_s, say=said, **{"volumes": False, **more})
        return [f"{ref.kind}/{ref.name}" for ref in deleted.gone], deleted.left

    def everything(self) -> set[str]:
        kinds = ("RayJob", "RayCluster", "Pod", "Secret", "NetworkPolicy")
        return {f"{kind}/{name}" for kind in kinds for name in self.kubernetes.objects(kind)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with FakeKubernetes() as kubernetes, connected(kubernetes, tmp_path, monkeypatch) as client:
        yield World(kubernetes, client, FakeKubeRay(kubernetes))


def test_every_object_is_tried_before_the_first_is_made(world: World) -> None:
    done = world.apply(ray_job(), network_policy())
    assert done == {"Secret/gpt-token": "created", "NetworkPolicy/gpt": "created", "RayJob/gpt": "created"}
    writes = [request for request in world.kubernetes.requests if request.verb in ("create", "patch")]
    assert [request.dry_run for request in writes] == [True] * 3 + [False] * 3
    assert {request.manager for request in writes} == {"ray-elastic"}
    assert [request.resource for request in writes[3:]] == ["secrets", "networkpolicies", "rayjobs"]


def test_a_dry_run_makes_nothing(world: World) -> None:
    assert world.apply(ray_job(), dry_run=True) == {"Secret/gpt-token": "created", "RayJob/gpt": "created"}
    assert world.everything() == set()


def test_applying_again_changes_nothing_and_keeps_the_token(world: World) -> None:
    world.apply(ray_job(), network_policy())
    token = world.kubernetes.objects("Secret")["gpt-token"]["data"]
    assert set(world.apply(ray_job(), network_policy()).values()) == {"unchanged"}
    assert world.apply(ray_job() | {"spec": {**ray_job()["spec"], "backoffLimit": 2}}) == {"RayJob/gpt": "changed"}
    assert world.kubernetes.objects("Secret")["gpt-token"]["data"] == token


def test_a_field_that_is_left_out_the_second_time_goes(world: World) -> None:
    more = ray_job()
    more["spec"]["activeDeadlineSeconds"] = 60
    world.apply(more)
    world.apply(ray_job())
    assert "activeDeadlineSeconds" not in world.kubernetes.objects("RayJob")["gpt"]["spec"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda spec: spec.update(entrypoint=3), "spec.entrypoint: .* must be of type string"),
        (lambda spec: spec.update(entrypiont="x"), "does not know the field spec.entrypiont .* older than KubeRay 1.7"),
        (
            lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("template"),
            r"spec.rayClusterSpec.workerGroupSpecs\[0\].template: Required value",
        ),
        (
            lambda spec: spec["rayClusterSpec"].update(authOptions={"mode": "none"}),
            'spec.rayClusterSpec.authOptions.mode: Unsupported value: "none": supported values: "disabled", "token"',
        ),
        (
            lambda spec: spec.update(deletionStrategy={"onSuccess": {"policy": "DeleteSelf"}}),
            "deletionStrategy requires either BOTH onSuccess and onFailure",
        ),
        (lambda spec: spec.update(preRunningDeadlineSeconds=0), "should be greater than or equal to 1"),
    ],
)
def test_what_the_schema_refuses_leaves_nothing_behind(world: World, change: Any, told: str) -> None:
    job = ray_job()
    change(job["spec"])
    with pytest.raises(KubeRefused, match=told):
        world.apply(job, network_policy())
    assert world.everything() == set()


def test_what_a_webhook_refuses(world: World) -> None:
    message = 'admission webhook "queues.example.org" denied the request: no queue for team'
    world.kubernetes.table.admission.append(
        lambda operation, found: Refusal(403, "Forbidden", message) if found["kind"] == "RayJob" else None
    )
    with pytest.raises(KubeRefused, match=r"webhook queues.example.org refuses RayJob gpt .*: no queue for team$"):
        world.apply(ray_job(), network_policy())
    assert world.everything() == set()


def test_no_quota(world: World) -> None:
    world.kubernetes.table.quota["team", "rayjobs.ray.io"] = 0
    with pytest.raises(KubeQuota, match="namespace team has no room for RayJob gpt: exceeded quota: team-quota"):
        world.apply(ray_job(), network_policy())
    assert world.everything() == set()


def test_what_was_made_before_a_failure_is_taken_away_again(world: World) -> None:
    world.kubernetes.faults.append(Fault("patch", "rayjobs", 500, times=10))
    with pytest.raises(KubeError, match="could not patch RayJob gpt"):
        world.apply(ray_job(), network_policy())
    assert world.everything() == set()


def test_ctrl_c_in_the_middle_leaves_nothing_half_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = world.client.apply

    def interrupted(manifest: dict[str, Any], **more: Any) -> Any:
        if manifest["kind"] == "RayJob" and not more["dry_run"]:
            assert world.everything() == {"Secret/gpt-token", "NetworkPolicy/gpt"}
            raise KeyboardInterrupt
        return apply(manifest, **more)

    monkeypatch.setattr(world.client, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.apply(ray_job(), network_policy())
    assert world.everything() == set()


def test_what_somebody_else_made_meanwhile_is_not_taken_away_after_a_failure(world: World) -> None:
    """Two start the same run at once, and one of them fails."""

    def quicker(operation: str, found: dict[str, Any]) -> None:
        if found["kind"] == "NetworkPolicy" and not world.kubernetes.objects("NetworkPolicy"):
            world.kubernetes.table.admission.clear()
            world.kubernetes.add(network_policy(), "ray-elastic")

    world.kubernetes.table.admission.append(quicker)
    world.kubernetes.faults.append(Fault("patch", "rayjobs", 500, times=10))
    with pytest.raises(KubeError):
        world.apply(ray_job(), network_policy())
    assert world.everything() == {"NetworkPolicy/gpt"}


def test_what_was_there_before_stays_when_a_change_fails(world: World) -> None:
    world.apply(ray_job(), network_policy())
    before = world.everything()
    world.kubernetes.faults.append(Fault("patch", "rayjobs", 500, times=10))
    with pytest.raises(KubeError):
        world.apply(ray_job(), network_policy())
    assert world.everything() == before


@pytest.mark.parametrize("code", [0, 429, 503])
def test_a_passing_fault_is_not_seen(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    world.kubernetes.faults.append(Fault("patch", "rayjobs", code))
    with connected(world.kubernetes, tmp_path, monkeypatch, Limits()) as client:
        world.client = client
        assert world.apply(ray_job())["RayJob/gpt"] == "created"


def test_a_field_of_another_manager_is_taken_only_by_force(world: World) -> None:
    world.apply(ray_job())
    world.kubernetes.table.update(
        world.kubernetes.resource("RayJob"),
        "team",
        "gpt",
        lambda live: live | {"spec": {**live["spec"], "backoffLimit": 7}},
        "kubectl-edit",
    )
    job = ray_job()
    job["spec"]["backoffLimit"] = 2
    with pytest.raises(KubeRefused, match=r"\.spec\.backoffLimit of RayJob gpt .* was set by kubectl-edit: .* --force"):
        world.apply(job)
    assert world.apply(job, force=True) == {"RayJob/gpt": "changed"}
    assert world.kubernetes.objects("RayJob")["gpt"]["spec"]["backoffLimit"] == 2


def test_somebody_elses_object_of_that_name_is_left_alone(world: World) -> None:
    world.kubernetes.add({**ray_job(), "metadata": {"name": "gpt", "namespace": "team"}})
    with pytest.raises(KubeRefused, match="was not made by `elastic kube apply`: choose another run id"):
        world.apply(ray_job())
    with pytest.raises(KubeNotFound, match="there is nothing of run gpt in namespace team"):
        world.delete()
    assert world.everything() == {"RayJob/gpt"}


def test_a_run_that_is_over_is_not_applied_again(world: World) -> None:
    world.apply(ray_job())
    world.operator.run("gpt")
    world.operator.finish("gpt", "SUCCEEDED")
    with pytest.raises(KubeRefused, match=r"is over \(finished\).*`elastic kube delete gpt`, then apply again"):
        world.apply(ray_job())


def test_a_secret_that_pods_need_is_asked_for_before_anything_is_made(world: World) -> None:
    job = ray_job()
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key"}}}]
    with pytest.raises(KubeRefused, match="namespace team has no secret s3, which the pods need: `kubectl"):
        world.apply(job)
    assert world.everything() == set()
    world.kubernetes.add({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3", "namespace": "team"}})
    assert "RayJob/gpt" in world.apply(job)


def test_a_token_of_the_users_own_is_used(world: World) -> None:
    own = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "gpt-token", "namespace": "team"}}
    world.kubernetes.add(own)
    assert world.apply(ray_job()) == {"RayJob/gpt": "created"}
    # It is not the run's, so it stays.
    assert world.delete()[0] == ["RayJob/gpt"]
    assert world.everything() == {"Secret/gpt-token"}


def test_the_contents_of_secrets_stay_in_the_cluster(world: World) -> None:
    world.apply(ray_job())
    ref = Ref("v1", "Secret", "team", "gpt-token")
    found = world.client.get(ref, metadata_only=True)
    assert found is not None
    (listed,) = world.client.find("v1", "Secret", "team", selector("gpt"), metadata_only=True)
    assert found.keys() == listed.keys() == {"apiVersion", "kind", "metadata"}
    assert (listed["kind"], listed["metadata"]["name"]) == ("Secret", "gpt-token")
    token = base64.b64decode(world.kubernetes.objects("Secret")["gpt-token"]["data"]["auth_token"])
    assert len(base64.b64decode(token)) == 32


def test_replicas_that_the_autoscaler_has_set_are_kept(world: World) -> None:
    world.apply(ray_cluster())

    def scaled(live: dict[str, Any]) -> dict[str, Any]:
        group = live["spec"]["workerGroupSpecs"][0]
        group |= {"replicas": 4, "scaleStrategy": {"workersToDelete": ["gpt-spot-0"]}}
        return live

    world.kubernetes.table.update(world.kubernetes.resource("RayCluster"), "team", "gpt", scaled, "kuberay-autoscaler")
    wanted = ray_cluster()
    wanted["spec"]["rayVersion"] = "2.60.1"
    with pytest.raises(KubeRefused, match=r"\.spec\.workerGroupSpecs of RayCluster gpt .* set by kuberay-autoscaler"):
        world.apply(wanted)
    world.apply(wanted, force=True)
    spec = world.kubernetes.objects("RayCluster")["gpt"]["spec"]
    assert spec["rayVersion"] == "2.60.1"
    assert spec["workerGroupSpecs"][0]["replicas"] == 4
    assert spec["workerGroupSpecs"][0]["scaleStrategy"] == {"workersToDelete": ["gpt-spot-0"]}


def test_the_life_of_a_run(world: World) -> None:
    world.apply(ray_job())
    assert look(world.client, "gpt", "team").state == "pending"
    world.operator.reconcile()
    assert look(world.client, "gpt", "team").state == "starting"
    world.operator.run("gpt")
    running = look(world.client, "gpt", "team")
    assert (running.state, running.over) == ("running", False)
    assert [pod.group for pod in running.pods] == ["submitter", "headgroup", "spot", "spot"]
    world.operator.finish("gpt", "FAILED", "Job entrypoint command failed with exit code 104, last available logs:\nx")
    over = look(world.client, "gpt", "team")
    assert (over.state, over.exit_code, over.over) == ("failed", 104, True)
    assert over.reason == "Job entrypoint command failed with exit code 104"
    # Its RayCluster carries the labels too, and is no run of its own.
    assert [each.run for each in find_runs(world.client, "team")] == ["gpt"]


def test_deleting_takes_what_is_ours_in_order_and_nothing_else(world: World) -> None:
    world.apply(ray_job(), network_policy())
    other = {**network_policy(), "metadata": {"name": "other", "namespace": "team", "labels": labels("other")}}
    world.kubernetes.add(other)
    world.operator.run("gpt")
    gone, left = world.delete()
    assert gone == ["RayJob/gpt", "NetworkPolicy/gpt", "Secret/gpt-token"]
    assert left == ()
    assert world.operator.stopped == ["gpt"]
    assert world.everything() == {"NetworkPolicy/other"}


def test_pods_are_waited_for_before_what_they_need_goes(world: World) -> None:
    world.apply(ray_job(), network_policy())
    world.operator.run("gpt")
    pods = world.kubernetes.resource("Pod")

    def held(live: dict[str, Any]) -> dict[str, Any]:
        live["metadata"]["finalizers"] = ["example.org/grace"]
        return live

    world.kubernetes.table.update(pods, "team", "gpt-abcde-head", held, "kubelet")
    _, left = world.delete(limit_s=0.2)
    assert left == ("Pod gpt-abcde-head in namespace team",)
    assert {"NetworkPolicy/gpt", "Secret/gpt-token"} <= world.everything()


def test_what_holds_an_object_is_named(world: World) -> None:
    world.apply(ray_cluster())

    def held(live: dict[str, Any]) -> dict[str, Any]:
        live["metadata"]["finalizers"] = ["ray.io/gcs-ft-redis-cleanup-finalizer"]
        return live

    world.kubernetes.table.update(world.kubernetes.resource("RayCluster"), "team", "gpt", held, "kuberay-operator")
    gone, left = world.delete(limit_s=0.2)
    assert gone == []
    assert left[0].startswith("RayCluster gpt in namespace team (held by ray.io/gcs-ft-redis-cleanup-finalizer")


def test_a_watch_that_is_too_old_begins_anew(world: World) -> None:
    world.apply(ray_job())
    world.operator.run("gpt")
    world.kubernetes.faults.append(Fault("watch", "rayjobs", 410))
    assert world.delete()[1] == ()
    assert world.everything() == set()


@pytest.mark.parametrize("told", [[], [{"changed": True}]])
def test_what_does_not_go_is_not_asked_for_without_a_pause(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """Changes all the time, or cannot be watched."""

        asked = 0

        def get(self, ref: Ref, *, metadata_only: bool) -> dict[str, Any]:
            self.asked += 1
            return {"metadata": {"uid": "u", "resourceVersion": str(self.asked)}}

        def watch(self, ref: Ref, resource_version: str, limit_s: float) -> Iterator[dict[str, Any]]:
            return iter(told)

    class Time:
        s = 100.0

        def monotonic(self) -> float:
            self.s += 1e-4
            return self.s

        def sleep(self, seconds: float) -> None:
            self.s += seconds

    held = Held()
    monkeypatch.setattr(runs, "time", Time())
    assert not runs.wait_gone(held, Ref("v1", "Secret", "team", "gpt"), "u", 110.0)  # type: ignore[arg-type]
    assert held.asked < 50


def test_a_volume_is_deleted_only_on_request(world: World) -> None:
    metadata = {"name": "gpt-gcs", "namespace": "team", "labels": labels("gpt")}
    world.kubernetes.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata})
    with pytest.raises(KubeNotFound):
        world.delete()
    assert world.delete(volumes=True)[0] == ["PersistentVolumeClaim/gpt-gcs"]


def test_who_may_do_too_little_is_told_the_verb(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.kubernetes.add(role([{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "list"]}]))
    world.kubernetes.add(binding("dev"))
    token = world.kubernetes.add_user("dev")
    with connected(world.kubernetes, tmp_path, monkeypatch, token=token) as client:
        with pytest.raises(
            KubeDenied, match=r"dev may not patch rayjobs.ray.io in namespace team: .*`kubectl auth can-i patch rayjobs"
        ):
            apply_run(client, "gpt", [without_token(ray_job())])
        with pytest.raises(KubeDenied, match=r"dev may not list rayclusters.ray.io in namespace team"):
            find_runs(client, "team")
    assert world.everything() == set()


def test_what_the_documents_say_a_user_needs_is_enough(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may(group: str, verbs: str, *resources: str) -> dict[str, Any]:
        return {"apiGroups": [group], "resources": list(resources), "verbs": verbs.split()}

    every = "get list watch create patch delete"
    rules = [
        may("ray.io", every, "rayjobs", "rayclusters"),
        may("networking.k8s.io", every, "networkpolicies"),
        may("", "get list create delete watch", "secrets"),
        may("", "get list watch", "pods"),
        may("", "get", "pods/log"),
    ]
    world.kubernetes.add(role(rules))
    world.kubernetes.add(binding("dev"))
    with connected(world.kubernetes, tmp_path, monkeypatch, token=world.kubernetes.add_user("dev")) as client:
        world.client = client
        world.apply(ray_job(), network_policy())
        pod = world.operator.run("gpt")
        assert look(client, "gpt", "team").state == "running"
        world.kubernetes.log("team", pod, "ray-job-submitter").write("2026-01-01T00:00:01Z one")
        assert list(client.read(Ref("v1", "Pod", "team", pod), "ray-job-submitter", None, False))
        assert world.delete()[1] == ()
    assert world.everything() == set()


def test_the_state_is_shown_to_who_may_not_see_the_pods(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.apply(ray_job())
    world.operator.run("gpt")
    rule = {"apiGroups": ["ray.io"], "resources": ["rayjobs", "rayclusters"], "verbs": ["get", "list"]}
    world.kubernetes.add(role([rule]))
    world.kubernetes.add(binding("dev"))
    with connected(world.kubernetes, tmp_path, monkeypatch, token=world.kubernetes.add_user("dev")) as client:
        found = look(client, "gpt", "team")
    assert (found.state, found.pods) == ("running", ())
    assert "its pods are not shown: dev may not list pods in namespace team" in caplog.text


def role(rules: list[dict[str, Any]]) -> dict[str, Any]:
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
    return {**kind, "metadata": {"name": "dev", "namespace": "team"}, "rules": rules}


def binding(user: str) -> dict[str, Any]:
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    subjects = [{"kind": "User", "name": user}]
    reference = {"kind": "Role", "name": "dev"}
    return {**kind, "metadata": {"name": "dev", "namespace": "team"}, "subjects": subjects, "roleRef": reference}


def without_token(job: dict[str, Any]) -> dict[str, Any]:
    job = json.loads(json.dumps(job))
    del job["spec"]["rayClusterSpec"]["authOptions"]
    return job
