"""What Kubernetes and KubeRay call things, and which names they take."""

from __future__ import annotations

import re

LONGEST_CLUSTER_NAME = 53
# The RayCluster of a RayJob has its name, a dash and five random characters.
LONGEST_NAME = LONGEST_CLUSTER_NAME - 6

OVERWRITE_COMMAND = "ray.io/overwrite-container-cmd"
NODE_TYPE = "ray.io/node-type"
MARKET_TYPE = "ray.io/market-type"
ZONE = "ray.io/availability-zone"
NODE_ZONE = "topology.kubernetes.io/zone"
NODE_REGION = "topology.kubernetes.io/region"
# Cluster autoscalers do not empty a machine for being little used while a pod with these is on it.
STAY = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
QUEUE = "kueue.x-k8s.io/queue-name"
ELASTIC_JOB = "kueue.x-k8s.io/elastic-job"

HEAD_GROUP = "headgroup"
CONTROLLER_GROUP = "controller"
# Ray's custom resource of the one pod where driver and controller run.
CONTROLLER_RESOURCE = "ray_elastic_controller"

DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
DASHBOARD_PORT = 8265

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def is_name(text: str, longest: int = LONGEST_NAME) -> bool:
    """Of a RayJob or RayCluster: a DNS-1035 label that leaves room for what KubeRay appends."""
    return len(text) <= longest and bool(_DNS_1035.fullmatch(text))


def is_dns_label(text: str) -> bool:
    """Of a namespace, a worker group: DNS-1123, 63 characters."""
    return len(text) <= 63 and bool(_DNS_1123.fullmatch(text))


def is_dns_name(text: str) -> bool:
    """Of a Secret, a claim: labels joined by dots, 253 characters."""
    return len(text) <= 253 and all(_DNS_1123.fullmatch(part) for part in text.split("."))


def is_label_value(text: str) -> bool:
    return len(text) <= 63 and bool(_LABEL_VALUE.fullmatch(text))


def is_label_key(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    return (not slash or is_dns_name(prefix)) and len(name) <= 63 and bool(_LABEL_NAME.fullmatch(name))


def dns_label(text: str) -> str:
    """The nearest name that `is_name` takes, for sentences that propose one."""
    clean = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    clean = clean if clean[:1].isalpha() else f"run-{clean}".rstrip("-")
    return clean[:LONGEST_NAME].rstrip("-")
