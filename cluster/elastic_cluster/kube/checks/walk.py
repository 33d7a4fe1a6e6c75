"""The parts of manifests that checks look at, each with the path of its field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Template:
    """A pod template. `role` is "head", "worker" or "submitter"; `group` is the specification that it is in."""

    path: str
    role: str
    group: Json
    spec: Json

    @property
    def containers(self) -> list[tuple[str, Json]]:
        """Every container that we describe, init containers included."""
        return [
            (f"{self.path}.spec.{kind}[{index}]", container)
            for kind in ("containers", "initContainers")
            for index, container in enumerate(self.spec.get(kind) or [])
        ]


def cluster_of(manifest: Json) -> tuple[str, Json] | None:
    """The RayCluster's specification and its path; None for other objects."""
    spec = manifest.get("spec") or {}
    if manifest.get("kind") == "RayCluster":
        return "spec", spec
    if manifest.get("kind") == "RayJob" and spec.get("rayClusterSpec") is not None:
        return "spec.rayClusterSpec", spec["rayClusterSpec"]
    return None


def groups_of(manifest: Json) -> Iterator[tuple[str, Json]]:
    """The worker groups."""
    found = cluster_of(manifest)
    if found is not None:
        path, spec = found
        for index, group in enumerate(spec.get("workerGroupSpecs") or []):
            yield f"{path}.workerGroupSpecs[{index}]", group


def templates(manifest: Json) -> Iterator[Template]:
    found = cluster_of(manifest)
    if found is not None:
        path, spec = found
        head = spec.get("headGroupSpec") or {}
        yield _template(f"{path}.headGroupSpec", "head", head)
    for path, group in groups_of(manifest):
        yield _template(path, "worker", group)
    submitter = (manifest.get("spec") or {}).get("submitterPodTemplate")
    if submitter is not None:
        yield Template("spec.submitterPodTemplate", "submitter", {}, submitter.get("spec") or {})


def _template(path: str, role: str, group: Json) -> Template:
    return Template(f"{path}.template", role, group, (group.get("template") or {}).get("spec") or {})


def first_container(template: Template) -> Json:
    """The one that Ray runs in; KubeRay says so by its place."""
    containers: Sequence[Json] = template.spec.get("containers") or [{}]
    return containers[0]


def variable(container: Json, name: str) -> Json | None:
    return next((item for item in container.get("env") or [] if item.get("name") == name), None)
