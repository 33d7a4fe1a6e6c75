"""Everything that is checked of manifests before they leave: schema, KubeRay's rules, Pod Security, our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_cluster.kube.checks import admission, invariants, pod_security, schema


def problems(manifests: Sequence[Mapping[str, Any]], node_start_s: int = 0) -> list[str]:
    """One sentence per finding, for example "RayJob gpt: spec.backoffLimit: is negative". Empty when all is well."""
    return [
        f"{manifest.get('kind')} {(manifest.get('metadata') or {}).get('name')}: {text}"
        for manifest in manifests
        for text in _of_one(manifest, node_start_s)
    ]


def _of_one(manifest: Mapping[str, Any], node_start_s: int) -> list[str]:
    # The rules take it for granted that fields are of the type that the schema says.
    found = list(schema.problems(manifest))
    if found:
        return found
    for rule in (*admission.RULES, *invariants.RULES):
        found += rule(manifest)
    return [*found, *pod_security.problems(manifest), *invariants.idle_timeout(manifest, node_start_s)]
