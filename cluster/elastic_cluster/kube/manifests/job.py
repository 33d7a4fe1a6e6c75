"""Input of the renderer: plain frozen data. Quantities are Kubernetes's ("500m", "64Gi"), durations seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SecretRef:
    """One key of a Secret in the run's namespace. Its value is never known here."""

    name: str
    key: str


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim that every pod of the run mounts."""

    claim: str
    mount: str
    read_only: bool = False


@dataclass(frozen=True)
class Size:
    """The resources of one pod: requests equal limits.

    `shm` is the size of /dev/shm, where Ray keeps objects. It is memory of the pod and counts against `memory`.
    `accelerators` are whole devices by resource name, for example {"nvidia.com/gpu": 8}.
    """

    cpu: str
    memory: str
    shm: str | None = None
    accelerators: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Which machines a pod may run on; `tolerations` as in a pod's specification."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Group:
    """Worker pods of one kind, from `min_replicas` to `max_replicas` times `hosts`.

    Of several groups whose pods a slot would fill equally well the autoscaler uses that of the highest `priority`.
    `drain_s` is how long a pod continues after its termination signal: no longer than the notice that its machine
    gives. `resources` are Ray's custom ones, `labels` Ray's node labels.
    """

    name: str
    size: Size
    max_replicas: int
    min_replicas: int = 0
    hosts: int = 1
    priority: int = 0
    capacity: Literal["on-demand", "spot"] = "on-demand"
    drain_s: int = 70
    idle_timeout_s: int | None = None
    zone: str | None = None
    place: Place = field(default_factory=Place)
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ControlStore:
    """Where Ray's control store keeps its tables. With "none" the loss of the head pod is the loss of the cluster."""

    kind: Literal["none", "rocksdb", "redis"] = "none"
    # rocksdb: a volume that the operator makes.
    size: str = "1Gi"
    storage_class: str | None = None
    # redis: "host:port"; credentials from Secrets only.
    address: str | None = None
    username: SecretRef | None = None
    password: SecretRef | None = None


@dataclass(frozen=True)
class Egress:
    """TCP to `ports` of the addresses in `cidr`."""

    cidr: str
    ports: tuple[int, ...] = (443,)


@dataclass(frozen=True)
class Network:
    """What the pods of the run may talk to besides each other and DNS; everything else is denied.

    `api_server` is where the autoscaler sidecar reaches the Kubernetes API. `operator_namespace` is KubeRay's,
    which asks the head how the job goes; None lets an operator in any namespace do so.
    """

    api_server: tuple[Egress, ...]
    egress: tuple[Egress, ...] = ()
    operator_namespace: str | None = None


@dataclass(frozen=True)
class KubeJob:
    """One run. `name` names the RayJob or RayCluster and prefixes the names of its other objects.

    `command` starts or continues the run: it must be idempotent, since every retry is a new cluster that calls
    it again; it may take `stop_s` to end when it is stopped. `slot` is what a pod must have room for, in Ray's
    resources; `min_slots` of them must fit at once. `files` (path in the pods to text) are put where the command runs.
    `node_start_s` is how long a new node may take.
    """

    name: str
    run_id: str
    image: str
    ray_version: str
    command: tuple[str, ...]
    groups: tuple[Group, ...]
    namespace: str = "default"
    as_cluster: bool = False
    slot: Mapping[str, float] = field(default_factory=dict)
    min_slots: int = 1
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str | SecretRef] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    head: Size = field(default_factory=lambda: Size("2", "8Gi"))
    head_place: Place = field(default_factory=Place)
    controller: Size = field(default_factory=lambda: Size("1", "4Gi"))
    controller_place: Place = field(default_factory=Place)
    control_store: ControlStore = field(default_factory=ControlStore)
    stop_s: int = 70
    node_start_s: int = 300
    idle_timeout_s: int = 600
    token_secret: str | None = None
    backoff_limit: int = 3
    ttl_s: int = 600
    deadline_s: int | None = None
    run_as_user: int = 1000
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    # Of workers and controller: an account that the user has, for example one with a role in the cloud.
    service_account: str | None = None
    rbac: bool = False
    network: Network | None = None
    queue: str | None = None
