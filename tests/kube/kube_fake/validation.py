"""What the fake refuses, and how it says so."""

from __future__ import annotations

import base64
import re
from typing import Any

from kube_fake import fields, schema
from kube_fake.resources import Resource

Manifest = dict[str, Any]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class Refusal(Exception):
    """An answer other than success, as a `Status`."""

    def __init__(
        self, code: int, reason: str, message: str, causes: list[dict[str, str]] | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": {"kind": kind, "causes": causes or []},
            "code": code,
        }


def validated(resource: Resource, new: Manifest, old: Manifest | None) -> Manifest:
    name = str(new["metadata"].get("name", ""))
    found = list(schema.problems(resource.schema, new, old)) if resource.schema else []
    if not _NAME.fullmatch(name) or len(name) > 253:
        message = f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric'
        found.append(schema.Problem("FieldValueInvalid", "metadata.name", message))
    if found:
        causes = [{"reason": each.reason, "message": each.message, "field": each.field} for each in found]
        told = ", ".join(f"{each.field}: {each.message}" for each in found)
        message = f'{resource.kind}.{resource.group} "{name}" is invalid: [{told}]'
        raise Refusal(422, "Invalid", message, causes, resource.kind)
    filled: Manifest = schema.filled_in(resource.schema, new)
    if resource.schema:
        filled = {**schema.pruned(resource.schema, filled), "metadata": filled["metadata"]}
    if resource.kind == "Secret":
        # `stringData` is write-only.
        given = {key: base64.b64encode(text.encode()).decode() for key, text in filled.pop("stringData", {}).items()}
        filled["data"] = {**filled.get("data", {}), **given}
    return filled


def check_known(resource: Resource, wanted: Manifest, strict: bool) -> None:
    if not resource.schema:
        return
    body = {key: value for key, value in wanted.items() if key not in ("apiVersion", "kind", "metadata")}
    if strict and (names := list(schema.unknown(resource.schema, body))):
        told = ", ".join(f'unknown field "{name}"' for name in names)
        raise Refusal(400, "BadRequest", f"failed to create typed patch object: strict decoding error: {told}")


def apply_conflict(resource: Resource, found: list[fields.FieldConflict]) -> Refusal:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{each.manager}" using {resource.api_version}',
            "field": fields.dotted(each.path),
        }
        for each in found
    ]
    told = ", ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    return Refusal(409, "Conflict", f"Apply failed with {len(found)} conflict(s): {told}", causes, resource.plural)
