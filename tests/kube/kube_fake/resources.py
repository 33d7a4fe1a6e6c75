"""The kinds that the fake serves, and how their paths are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_cluster.kube.checks.schema import crd_schema


@dataclass(frozen=True)
class Resource:
    """`schema` is empty for built-in kinds."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    schema: Mapping[str, Any] = field(default_factory=dict)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages name it: "rayjobs.ray.io", "pods"."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True)
class Place:
    """What a path names; `name` is None for the collection."""

    resource: Resource
    namespace: str | None
    name: str | None
    subresource: str | None


_BUILT_IN = [
    ("", "v1", "namespaces", "Namespace", False),
    ("", "v1", "pods", "Pod", True),
    ("", "v1", "secrets", "Secret", True),
    ("", "v1", "configmaps", "ConfigMap", True),
    ("", "v1", "serviceaccounts", "ServiceAccount", True),
    ("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True),
    ("", "v1", "services", "Service", True),
    ("", "v1", "events", "Event", True),
    ("apps", "v1", "deployments", "Deployment", True),
    ("batch", "v1", "jobs", "Job", True),
    ("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True),
    ("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True),
    ("rbac.authorization.k8s.io", "v1", "roles", "Role", True),
    ("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", True),
    ("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False),
]


def served(kuberay: str | None) -> list[Resource]:
    """With the kinds of KubeRay in this version ("v1"), or without KubeRay."""
    found = [Resource(*each) for each in _BUILT_IN]
    if kuberay is not None:
        for kind in ("RayCluster", "RayJob"):
            found.append(Resource("ray.io", kuberay, f"{kind.lower()}s", kind, True, crd_schema(kind)))
    return found


def locate(resources: Iterable[Resource], path: str) -> Place | None:
    """None for a path that no resource has."""
    parts = [part for part in path.split("/") if part]
    if len(parts) < 3 or parts[0] not in ("api", "apis"):
        return None
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    namespace = None
    if len(rest) >= 3 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    for resource in resources:
        if rest and (resource.group, resource.version, resource.plural) == (group, version, rest[0]):
            return Place(resource, namespace, *_padded(rest[1:]))
    return None


def _padded(rest: list[str]) -> tuple[str | None, str | None]:
    return (rest[0] if rest else None), (rest[1] if len(rest) > 1 else None)


# What GET /api answers.
VERSIONS_DOCUMENT = {"kind": "APIVersions", "versions": ["v1"]}


def openapi_document(resources: Iterable[Resource], path: str) -> dict[str, Any] | None:
    """What GET /openapi/v3 answers, and under it ("apis/ray.io/v1"): no schemas, but that the server validates fields
    and tries requests itself, which is what kubectl looks for."""
    by_path: dict[str, list[Resource]] = {}
    for each in resources:
        by_path.setdefault(f"{'apis' if each.group else 'api'}/{each.api_version}", []).append(each)
    if not path:
        return {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}?hash=0"} for name in by_path}}
    if path not in by_path:
        return None
    options = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")]
    paths = {}
    for each in by_path[path]:
        place = "namespaces/{namespace}/" if each.namespaced else ""
        kind = {"group": each.group, "version": each.version, "kind": each.kind}
        patch = {"parameters": options, "x-kubernetes-group-version-kind": kind, "responses": {}}
        paths[f"/{path}/{place}{each.plural}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "v1"}, "paths": paths}


def groups_document(resources: Iterable[Resource]) -> dict[str, Any]:
    """What GET /apis answers."""
    versions: dict[str, list[str]] = {}
    for resource in resources:
        if resource.group and resource.version not in versions.setdefault(resource.group, []):
            versions[resource.group].append(resource.version)
    listed = []
    for group, names in versions.items():
        entries = [{"groupVersion": f"{group}/{name}", "version": name} for name in names]
        listed.append({"name": group, "versions": entries, "preferredVersion": entries[0]})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def resources_document(resources: Iterable[Resource], api_version: str) -> dict[str, Any] | None:
    """What GET /apis/GROUP/VERSION answers; None for a version that is not served."""
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    found = [
        {
            "name": each.plural,
            "singularName": each.kind.lower(),
            "kind": each.kind,
            "namespaced": each.namespaced,
            "verbs": verbs,
        }
        for each in resources
        if each.api_version == api_version
    ]
    return {"kind": "APIResourceList", "groupVersion": api_version, "resources": found} if found else None
