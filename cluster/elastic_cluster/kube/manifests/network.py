"""Network policies, on request: the pods of a run talk to each other, to DNS, to what the job names, to nothing else.

Plain NetworkPolicy objects, since KubeRay's own field for them is behind a feature gate that is off, and selects pods
by the name of the RayCluster, which a RayJob makes up. Pods are known by the run's labels, which all of ours carry.
"""

from __future__ import annotations

from elastic_cluster.kube.manifests import labels, names
from elastic_cluster.kube.manifests.job import Egress, KubeJob, Network
from elastic_cluster.kube.manifests.pods import Json

_NODE_LOCAL_DNS = "169.254.20.10/32"


def policies(job: KubeJob) -> list[Json]:
    if job.network is None:
        return []
    return [_of_all(job, job.network), _of_the_head(job, job.network)]


def _of_all(job: KubeJob, network: Network) -> Json:
    own = [{"podSelector": {"matchLabels": labels.labels(job.run_id)}}]
    spec = {
        "podSelector": {"matchLabels": labels.labels(job.run_id)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": own}],
        "egress": [{"to": own}, _dns(), *(_to(egress) for egress in network.egress)],
    }
    return _policy(job, job.name, spec)


def _of_the_head(job: KubeJob, network: Network) -> Json:
    """Policies add up. The operator queries the job's status here; the autoscaler sidecar reaches the API."""
    operator: Json = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    if network.operator_namespace is not None:
        operator["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": network.operator_namespace}}
    spec = {
        "podSelector": {"matchLabels": {**labels.labels(job.run_id), names.NODE_TYPE: "head"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [operator], "ports": [{"protocol": "TCP", "port": names.DASHBOARD_PORT}]}],
        "egress": [_to(egress) for egress in network.api_server],
    }
    return _policy(job, f"{job.name}-head", spec)


def _policy(job: KubeJob, name: str, spec: Json) -> Json:
    about = {"name": name, "namespace": job.namespace, "labels": labels.labels(job.run_id)}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": about, "spec": spec}


def _dns() -> Json:
    """The cluster's DNS, and the cache on the machine itself where there is one: that is not a pod."""
    system = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {"to": [system, {"ipBlock": {"cidr": _NODE_LOCAL_DNS}}], "ports": ports}


def _to(egress: Egress) -> Json:
    ports = [{"protocol": "TCP", "port": port} for port in egress.ports]
    return {"to": [{"ipBlock": {"cidr": egress.cidr}}], "ports": ports}
