"""JSON Patch (RFC 6902, as far as Ray's autoscaler uses it) and JSON Merge Patch (RFC 7396)."""

from __future__ import annotations

import copy
from typing import Any

from kube_fake.validation import Manifest, Refusal


def patched(content_type: str, live: Manifest, body: Any) -> Manifest:
    """`live` changed by `body`; raises Refusal."""
    match content_type:
        case "application/json-patch+json":
            result = copy.deepcopy(live)
            for operation in body:
                _operate(result, operation)
            return result
        case "application/merge-patch+json" | "application/strategic-merge-patch+json":
            merged: Manifest = _merge(live, body)
            return merged
        case "application/json":
            replaced: Manifest = body
            return replaced
        case _:
            raise Refusal(
                415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}"
            )


def _operate(document: Any, operation: dict[str, Any]) -> None:
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    try:
        for part in way:
            document = document[int(part) if isinstance(document, list) else part]
        _apply(document, last, operation)
    except (KeyError, IndexError, ValueError) as error:
        message = f"the server rejected our request due to an error in our request: {operation['path']}: {error}"
        raise Refusal(422, "Invalid", message) from None


def _apply(parent: Any, last: str, operation: dict[str, Any]) -> None:
    key: Any = last if isinstance(parent, dict) or last == "-" else int(last)
    match operation["op"]:
        case "add" if isinstance(parent, list):
            parent.insert(len(parent) if key == "-" else key, operation["value"])
        case "add":
            parent[key] = operation["value"]
        case "replace":
            # The library in the API server takes a replace of a missing key of an object for an add.
            parent[key] = operation["value"]
        case "remove":
            del parent[key]
        case "test":
            if parent[key] != operation["value"]:
                raise ValueError("testing path failed")
        case other:
            raise ValueError(f"unknown operation {other}")


def _merge(live: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(live) if isinstance(live, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result
