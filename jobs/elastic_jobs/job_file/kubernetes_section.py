"""The `kubernetes:` section of a job file. docs/kubernetes.md explains each key; only `image` has no default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from elastic_cluster.kube.manifests import job as kube
from elastic_cluster.kube.manifests import quantity
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

_CONFIG = ConfigDict(extra="forbid", frozen=True, strict=True)


def _quantity(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a quantity such as 2, 500m or 64Gi")
    quantity.parse(str(value))
    return str(value)


Quantity = Annotated[str, PlainValidator(_quantity)]
Count = Annotated[int, Field(ge=1)]
Many = Annotated[int, Field(ge=0)]


class SecretSpec(BaseModel):
    """One key of a Secret in the run's namespace."""

    model_config = _CONFIG

    secret: str
    key: str

    def ref(self) -> kube.SecretRef:
        return kube.SecretRef(self.secret, self.key)


class VolumeSpec(BaseModel):
    model_config = _CONFIG

    claim: str
    mount: str
    read_only: bool = False


class PodSpec(BaseModel):
    """The head's and the controller's pod. Memory-backed /dev/shm is part of `memory`."""

    model_config = _CONFIG

    cpu: Quantity
    memory: Quantity
    shm: Quantity | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: list[dict[str, Any]] = Field(default_factory=list)

    def size(self) -> kube.Size:
        return kube.Size(self.cpu, self.memory, self.shm)

    def place(self) -> kube.Place:
        return kube.Place(self.node_selector, tuple(self.tolerations))


class GroupSpec(BaseModel):
    """Worker pods of one kind. None: the needs of one slot of the job."""

    model_config = _CONFIG

    name: str
    cpu: Quantity | None = None
    memory: Quantity | None = None
    shm: Quantity | None = None
    accelerators: dict[str, Any] | None = None
    resources: dict[str, Count] | None = None
    min_replicas: Many = 0
    max_replicas: Count | None = None
    hosts: Count = 1
    priority: int = 0
    capacity: Literal["on-demand", "spot"] = "on-demand"
    drain_s: Count | None = None
    idle_timeout_s: Count | None = None
    zone: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: list[dict[str, Any]] = Field(default_factory=list)


class ControlStoreSpec(BaseModel):
    model_config = _CONFIG

    kind: Literal["none", "rocksdb", "redis"] = "none"
    size: Quantity = "1Gi"
    storage_class: str | None = None
    address: str | None = None
    username: SecretSpec | None = None
    password: SecretSpec | None = None


class EgressSpec(BaseModel):
    model_config = _CONFIG

    cidr: str
    ports: list[Count] = Field(default_factory=lambda: [443], min_length=1)

    def egress(self) -> kube.Egress:
        return kube.Egress(self.cidr, tuple(self.ports))


class NetworkSpec(BaseModel):
    model_config = _CONFIG

    api_server: list[EgressSpec] = Field(min_length=1)
    egress: list[EgressSpec] = Field(default_factory=list)
    operator_namespace: str | None = None


class KubernetesSpec(BaseModel):
    """How the job runs on Kubernetes. `folder` is the job file's folder in the image."""

    model_config = _CONFIG

    image: str | None = None
    namespace: str = "default"
    folder: str = "/app"
    groups: list[GroupSpec] = Field(default_factory=lambda: [GroupSpec(name="workers")], min_length=1)
    head: PodSpec = Field(default_factory=lambda: PodSpec(cpu="2", memory="8Gi"))
    controller: PodSpec = Field(default_factory=lambda: PodSpec(cpu="1", memory="4Gi"))
    control_store: ControlStoreSpec = Field(default_factory=ControlStoreSpec)
    env: dict[str, str | SecretSpec] = Field(default_factory=dict)
    volumes: list[VolumeSpec] = Field(default_factory=list)
    network_policy: NetworkSpec | None = None
    service_account: str | None = None
    rbac: bool = False
    queue: str | None = None
    token_secret: str | None = None
    node_start_s: Count = 300
    idle_timeout_s: Count = 600
    backoff_limit: Many = 3
    ttl_s: Many = 600
    deadline_s: Count | None = None
    run_as_user: Count = 1000
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: list[str] = Field(default_factory=list)


def keys() -> dict[tuple[str, ...], list[str]]:
    """The valid keys of the section and its subsections, for messages about unknown keys."""
    sections: dict[tuple[str, ...], type[BaseModel]] = {
        (): KubernetesSpec,
        ("groups",): GroupSpec,
        ("head",): PodSpec,
        ("controller",): PodSpec,
        ("control_store",): ControlStoreSpec,
        ("volumes",): VolumeSpec,
        ("network_policy",): NetworkSpec,
        ("network_policy", "api_server"): EgressSpec,
        ("network_policy", "egress"): EgressSpec,
    }
    return {("kubernetes", *path): list(model.model_fields) for path, model in sections.items()}
