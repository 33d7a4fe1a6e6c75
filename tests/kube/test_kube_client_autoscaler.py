"""What is rendered, in the hands of Ray's own autoscaler: its reader, its scheduler and its KubeRay provider.

They are the real ones, over HTTP against the fake API server, with no permissions but those of the rendered Role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from elastic_cluster.kube.client.apply import apply_run
from elastic_cluster.kube.manifests import names, quantity
from elastic_cluster.kube.manifests.job import Group, KubeJob, Size
from elastic_cluster.kube.manifests.render import render
from kube_fake import FakeKubeRay, FakeKubernetes
from kube_samples import connected
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.kuberay.node_provider import IKubernetesHttpApiClient, url_from_resource
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import KubeRayProvider
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest

_GPUS = Size("16", "128Gi", accelerators={"nvidia.com/gpu": 8})
_SLOT = {"CPU": 8.0, "GPU": 4.0}
JOB = KubeJob(
    name="gpt",
    run_id="gpt",
    image="example/gpt",
    ray_version="2.60.0",
    command=("elastic", "drive", "gpt.yaml", "--run-id", "gpt"),
    groups=(
        Group("spot", _GPUS, max_replicas=3, min_replicas=1, priority=10, capacity="spot", zone="z1", drain_s=25),
        Group("steady", _GPUS, max_replicas=4, priority=0, idle_timeout_s=900),
        Group("pairs", dataclasses.replace(_GPUS, cpu="500m"), max_replicas=2, hosts=2, resources={"rack": 2}),
    ),
    namespace="team",
    as_cluster=True,
    rbac=True,
    slot=_SLOT,
)


class Http(IKubernetesHttpApiClient):
    """Ray's own paths, to another host."""

    def __init__(self, kubernetes: FakeKubernetes, token: str) -> None:
        self._kubernetes = kubernetes
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {token}"
        self.patches: list[Any] = []

    def get(self, path: str) -> Any:
        return self._send("GET", path)

    def patch(self, path: str, payload: Any, content_type: str = "application/json-patch+json") -> Any:
        self.patches.append(payload)
        return self._send("PATCH", path, json=payload, headers={"Content-Type": content_type})

    def delete(self, path: str) -> Any:
        return self._send("DELETE", path)

    def close(self) -> None:
        self._session.close()

    def _send(self, method: str, path: str, **more: Any) -> Any:
        url = url_from_resource("team", path, "v1", "https://cluster").replace("https://cluster", self._kubernetes.url)
        answer = self._session.request(method, url, timeout=10.0, **more)
        answer.raise_for_status()
        return answer.json()


class World:
    def __init__(self, kubernetes: FakeKubernetes, api: Http) -> None:
        self.kubernetes, self.api, self.operator = kubernetes, api, FakeKubeRay(kubernetes)
        self.provider = KubeRayProvider("gpt", {"namespace": "team"}, None, api)

    def config(self) -> dict[str, Any]:
        producer = autoscaling_config.AutoscalingConfigProducer("gpt", "team")
        producer.kubernetes_api_client = self.api
        found: dict[str, Any] = producer()
        return found

    def pods(self) -> dict[str, str]:
        """As the provider sees them: the group of each."""
        return {name: each.node_type for name, each in self.provider.get_non_terminated().items()}

    def group(self, name: str) -> dict[str, Any]:
        groups = self.kubernetes.objects("RayCluster")["gpt"]["spec"]["workerGroupSpecs"]
        return next(dict(group) for group in groups if group["groupName"] == name)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with FakeKubernetes() as kubernetes:
        with connected(kubernetes, tmp_path, monkeypatch) as client:
            apply_run(client, "gpt", render(JOB))
        api = Http(kubernetes, kubernetes.add_user("system:serviceaccount:team:gpt-head"))
        yield World(kubernetes, api)
        api.close()


def test_groups_are_understood_as_they_are_meant(world: World) -> None:
    config = world.config()
    found = config["available_node_types"]
    assert config["head_node_type"] == names.HEAD_GROUP
    assert list(found) == [names.HEAD_GROUP, names.CONTROLLER_GROUP, "spot", "steady", "pairs"]
    counts = {name: (each["min_workers"], each["max_workers"]) for name, each in found.items()}
    assert counts == {"headgroup": (0, 0), "controller": (1, 1), "spot": (1, 3), "steady": (0, 4), "pairs": (0, 4)}
    assert found["spot"]["resources"] == {"CPU": 16, "GPU": 8, "memory": 128 * 2**30}
    # Ray rounds cores up; what a slot may use of them is `room`'s business.
    assert found["pairs"]["resources"] == {"CPU": 1, "GPU": 8, "memory": 128 * 2**30, "rack": 2}
    assert found["spot"]["labels"] == {names.MARKET_TYPE: "spot", names.ZONE: "z1"}
    assert (found["spot"]["priority"], found["steady"]["priority"]) == (10, 0)
    assert (found["spot"]["idle_timeout_s"], found["steady"]["idle_timeout_s"]) == (600.0, 900.0)
    assert config["idle_timeout_minutes"] == 10.0


def test_nothing_but_driver_and_controller_fits_beside_them(world: World) -> None:
    found = world.config()["available_node_types"]
    assert found[names.HEAD_GROUP]["resources"]["CPU"] == 0
    assert found[names.CONTROLLER_GROUP]["resources"] == {
        "CPU": 0,
        names.CONTROLLER_RESOURCE: 1,
        "memory": quantity.whole(JOB.controller.memory),
    }


def test_slots_go_to_the_group_of_the_higher_priority_first(world: World) -> None:
    """Two slots fit into a pod: ten of them are three spot pods, as many as there may be, and two others."""
    assert launched(world, slots=10) == {"controller": 1, "spot": 3, "steady": 2}
    assert launched(world, slots=0) == {"controller": 1, "spot": 1}


def test_more_slots_than_there_may_be_are_not_promised(world: World) -> None:
    config = AutoscalingConfig(world.config(), skip_content_hash=True)
    reply = ResourceDemandScheduler().schedule(request(config, slots=23, slot={"CPU": 8, "GPU": 4}))
    assert sum(each.count for each in reply.to_launch) == 1 + 3 + 4
    assert len(reply.infeasible_gang_resource_requests) == 23 - 14


def test_scaling_up_and_down_by_the_rendered_role(world: World) -> None:
    world.operator.reconcile()
    assert world.pods() == {"gpt-head": "headgroup", "gpt-controller-0": "controller", "gpt-spot-0": "spot"}
    world.provider.launch({"spot": 1, "steady": 2, "pairs": 2}, "request-1")
    assert world.provider.poll_errors() == []
    assert {name: world.group(name)["replicas"] for name in ("spot", "steady", "pairs")} == {
        "spot": 2,
        "steady": 2,
        "pairs": 1,
    }
    world.operator.reconcile()
    assert sorted(world.pods().values()) == [
        "controller",
        "headgroup",
        "pairs",
        "pairs",
        "spot",
        "spot",
        "steady",
        "steady",
    ]

    world.provider.terminate(["gpt-steady-0"], "request-2")
    assert world.provider.poll_errors() == []
    group = world.group("steady")
    assert (group["replicas"], group["scaleStrategy"]) == (1, {"workersToDelete": ["gpt-steady-0"]})
    world.operator.reconcile()
    assert [name for name, kind in world.pods().items() if kind == "steady"] == ["gpt-steady-1"]


def test_no_more_than_max_replicas(world: World) -> None:
    world.operator.reconcile()
    world.provider.launch({"spot": 5}, "request-1")
    (error,) = world.provider.poll_errors()
    assert (error.node_type, error.count) == ("spot", 3)
    assert world.group("spot")["replicas"] == 3


def test_the_role_allows_nothing_else(world: World) -> None:
    world.operator.reconcile()
    world.kubernetes.add(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {"name": "other", "namespace": "team"},
            "spec": world.kubernetes.objects("RayCluster")["gpt"]["spec"],
        }
    )
    patch = [{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": 9}]
    for forbidden in (
        lambda: world.api.patch("rayclusters/other", patch),
        lambda: world.api.patch("pods/gpt-head", patch),
        lambda: world.api.delete("pods/gpt-head"),
        lambda: world.api.delete("rayclusters/gpt"),
    ):
        with pytest.raises(requests.HTTPError, match="403"):
            forbidden()


def test_applying_again_keeps_what_the_autoscaler_has_set(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.operator.reconcile()
    world.provider.launch({"spot": 2}, "request-1")
    with connected(world.kubernetes, tmp_path, monkeypatch) as client:
        apply_run(client, "gpt", render(dataclasses.replace(JOB, image="example/gpt:2")), force=True)
    assert world.group("spot")["replicas"] == 3
    assert world.group("spot")["template"]["spec"]["containers"][0]["image"] == "example/gpt:2"


def launched(world: World, slots: int) -> dict[str, int]:
    config = AutoscalingConfig(world.config(), skip_content_hash=True)
    reply = ResourceDemandScheduler().schedule(request(config, slots, _SLOT))
    assert reply.infeasible_gang_resource_requests == []
    return {each.instance_type: each.count for each in reply.to_launch}


def request(config: AutoscalingConfig, slots: int, slot: dict[str, float]) -> SchedulingRequest:
    """One placement group per slot, as our controller asks."""
    groups = [GangResourceRequest(requests=[ResourceRequestUtil.make(slot)]) for _ in range(slots)]
    return SchedulingRequest(
        disable_launch_config_check=config.disable_launch_config_check(),
        node_type_configs=config.get_node_type_configs(),
        max_num_nodes=config.get_max_num_nodes(),
        idle_timeout_s=config.get_idle_timeout_s(),
        gang_resource_requests=groups,
    )
