"""RayJobs and RayClusters against the schemas of KubeRay's own resource definitions, shipped with this package."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

import jsonschema

Json = dict[str, Any]

_FILES = {"RayCluster": "rayclusters.v1.json.gz", "RayJob": "rayjobs.v1.json.gz"}


@lru_cache(maxsize=len(_FILES))
def definition(kind: str) -> Json:
    """Of "RayJob" or "RayCluster": its `openAPIV3Schema` as it was published, and `source`. Do not change it."""
    packed = resources.files("elastic_cluster.kube.checks").joinpath("schemas").joinpath(_FILES[kind]).read_bytes()
    found: Json = json.loads(gzip.decompress(packed))
    return found


def crd_schema(kind: str) -> Json:
    """The `openAPIV3Schema` of "RayJob" or "RayCluster". Do not modify the result."""
    found: Json = definition(kind)["openAPIV3Schema"]
    return found


def problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each field that the schema does not know or take, path first. Other kinds have no schema here."""
    validator = _validator(str(manifest.get("kind")))
    if validator is not None:
        for error in sorted(validator.iter_errors(manifest), key=lambda error: list(map(str, error.absolute_path))):
            yield f"{_path(error.absolute_path)}: {error.message}"


@lru_cache(maxsize=len(_FILES))
def _validator(kind: str) -> Any:
    if kind not in _FILES:
        return None
    return jsonschema.Draft202012Validator(_strict(crd_schema(kind)))


def _strict(schema: Any) -> Any:
    """The same, with unknown fields refused: the API server drops them without a word, which hides a slip."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _strict(value) if key != "properties" else _fields(value) for key, value in schema.items()}
    known = "properties" in schema and "additionalProperties" not in schema
    if known and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    return result


def _fields(properties: Mapping[str, Any]) -> Json:
    """Apart from `_strict`, since a field may have any name, "properties" for one."""
    return {name: _strict(schema) for name, schema in properties.items()}


def _path(parts: Iterable[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".") or "the manifest"
