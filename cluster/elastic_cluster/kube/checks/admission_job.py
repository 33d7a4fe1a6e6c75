"""What KubeRay's operator (1.7) rejects of a RayJob besides its cluster. See `admission`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import yaml

from elastic_cluster.kube.checks.walk import Json

Sentences = Iterator[str]


def job_lifetime(manifest: Json) -> Sentences:
    if manifest.get("kind") != "RayJob":
        return
    spec = manifest.get("spec") or {}
    ends = bool(spec.get("shutdownAfterJobFinishes"))
    if spec.get("suspend") and not ends:
        yield "spec.suspend: needs shutdownAfterJobFinishes"
    if (spec.get("ttlSecondsAfterFinished") or 0) < 0:
        yield "spec.ttlSecondsAfterFinished: is negative"
    if not ends and (spec.get("ttlSecondsAfterFinished") or 0) > 0:
        yield "spec.ttlSecondsAfterFinished: needs shutdownAfterJobFinishes"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key) is not None and spec[key] <= 0:
            yield f"spec.{key}: must be more than 0"
    if (spec.get("backoffLimit") or 0) < 0:
        yield "spec.backoffLimit: is negative"


def job_cluster(manifest: Json) -> Sentences:
    if manifest.get("kind") != "RayJob":
        return
    spec = manifest.get("spec") or {}
    selector = spec.get("clusterSelector") or {}
    if not selector and spec.get("rayClusterSpec") is None:
        yield "spec: one of rayClusterSpec and clusterSelector must be set"
    if selector and (spec.get("backoffLimit") or 0) > 0:
        yield "spec.backoffLimit: not together with clusterSelector, since every retry is a new cluster"
    if selector and spec.get("suspend"):
        yield "spec.suspend: not together with clusterSelector"
    if spec.get("submissionMode") == "InteractiveMode" and (spec.get("backoffLimit") or 0) > 0:
        yield "spec.backoffLimit: not in InteractiveMode"
    if spec.get("submissionMode") == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig"):
            if spec.get(key) is not None:
                yield f"spec.{key}: not in SidecarMode"


def runtime_env(manifest: Json) -> Sentences:
    text = (manifest.get("spec") or {}).get("runtimeEnvYAML")
    if manifest.get("kind") != "RayJob" or not text:
        return
    try:
        valid = isinstance(yaml.safe_load(text), dict)
    except yaml.YAMLError:
        valid = False
    if not valid:
        yield "spec.runtimeEnvYAML: is not a YAML mapping"


RULES: tuple[Callable[[Json], Sentences], ...] = (job_lifetime, job_cluster, runtime_env)
