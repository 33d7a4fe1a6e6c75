"""A small run on Kubernetes, valid by KubeRay's schemas, and a client of a fake API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_cluster.kube.client.api import Limits
from elastic_cluster.kube.client.connect import connect
from elastic_cluster.kube.client.official import OfficialClient
from elastic_cluster.kube.manifests.labels import labels
from kube_fake import FakeKubernetes
from kube_fake.server import kubeconfig

QUICK = Limits(connect_s=5.0, request_s=5.0, idle_s=5.0, retry_s=0.3)


def pod(container: str) -> dict[str, Any]:
    limits = {"cpu": "2", "memory": "4Gi"}
    return {
        "spec": {
            "containers": [
                {"name": container, "image": "example/ray", "resources": {"limits": limits, "requests": limits}}
            ]
        }
    }


def cluster_spec() -> dict[str, Any]:
    group = {"groupName": "spot", "minReplicas": 1, "maxReplicas": 4, "replicas": 2, "template": pod("ray-worker")}
    return {
        "rayVersion": "2.60.0",
        "enableInTreeAutoscaling": True,
        "authOptions": {"mode": "token", "secretName": "gpt-token"},
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": pod("ray-head")},
        "workerGroupSpecs": [group],
    }


def ray_job(run_id: str = "gpt", namespace: str = "team") -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": run_id, "namespace": namespace, "labels": labels(run_id)},
        "spec": {"entrypoint": "elastic drive", "shutdownAfterJobFinishes": True, "rayClusterSpec": cluster_spec()},
    }


def ray_cluster(run_id: str = "gpt", namespace: str = "team") -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": run_id, "namespace": namespace, "labels": labels(run_id)},
        "spec": cluster_spec(),
    }


def network_policy(run_id: str = "gpt", namespace: str = "team") -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": run_id, "namespace": namespace, "labels": labels(run_id)},
        "spec": {"podSelector": {"matchLabels": {"ray.io/cluster": run_id}}, "policyTypes": ["Ingress"]},
    }


@contextmanager
def connected(
    kubernetes: FakeKubernetes | str, folder: Path, monkeypatch: Any, limits: Limits = QUICK, **more: Any
) -> Iterator[OfficialClient]:
    """Through a kubeconfig, as a user would; to the fake or to any URL."""
    url = kubernetes if isinstance(kubernetes, str) else kubernetes.url
    (folder / "kubeconfig").write_text(kubeconfig(url, **more))
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    client = connect(None, limits)
    try:
        yield client
    finally:
        client.close()
