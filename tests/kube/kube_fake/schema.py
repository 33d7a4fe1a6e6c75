"""A CRD's structural schema: what it refuses, what it does not know, what it fills in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
# What the validation rules of the CRDs mean, by their text, since nothing here evaluates CEL. An unknown rule is an
# error when the server is made, so that a new release of the CRDs cannot bring one that is not looked at.
RULES: dict[str, Callable[[Any, Any], bool]] = {
    "self == oldSelf": lambda new, old: old is None or new == old,
    "self in ['ray.io/kuberay-operator', 'kueue.x-k8s.io/multikueue']": lambda new, old: (
        new in ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
    ),
    "!((has(self.onSuccess) || has(self.onFailure)) && has(self.deletionRules))": lambda new, old: (
        not (("onSuccess" in new or "onFailure" in new) and "deletionRules" in new)
    ),
    "((has(self.onSuccess) && has(self.onFailure)) || has(self.deletionRules))": lambda new, old: (
        ("onSuccess" in new and "onFailure" in new) or "deletionRules" in new
    ),
    "!(has(self.jobStatus) && has(self.jobDeploymentStatus))": lambda new, old: (
        not ("jobStatus" in new and "jobDeploymentStatus" in new)
    ),
    "has(self.jobStatus) || has(self.jobDeploymentStatus)": lambda new, old: (
        "jobStatus" in new or "jobDeploymentStatus" in new
    ),
}


@dataclass(frozen=True)
class Problem:
    """One cause of a `Status`: `field` is for example "spec.workerGroupSpecs[0].minReplicas"."""

    reason: str
    field: str
    message: str


def rules(schema: Any) -> Iterator[str]:
    """The text of every validation rule in it."""
    if isinstance(schema, dict):
        for rule in schema.get("x-kubernetes-validations", []):
            yield rule["rule"]
        for value in schema.values():
            yield from rules(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from rules(value)


def problems(schema: Mapping[str, Any], value: Any, old: Any = None, path: str = "") -> Iterator[Problem]:
    """Everything that the API server would refuse. `old` is the stored value, for rules about changes."""
    if not _has_type(schema, value):
        wanted, found = schema.get("type", "integer or string"), _type_name(value)
        message = f'Invalid value: "{found}": {path} in body must be of type {wanted}: "{found}"'
        yield Problem("FieldValueTypeInvalid", path, message)
        return
    yield from _value_problems(schema, value, path)
    if isinstance(value, dict):
        yield from _object_problems(schema, value, old if isinstance(old, dict) else {}, path)
    elif isinstance(value, list):
        before = old if isinstance(old, list) else []
        for index, item in enumerate(value):
            was = before[index] if index < len(before) else None
            yield from problems(schema.get("items", {}), item, was, f"{path}[{index}]")
    for rule in schema.get("x-kubernetes-validations", []):
        if not RULES[rule["rule"]](value, old):
            shown = "object" if isinstance(value, dict) else value
            yield Problem("FieldValueInvalid", path, f'Invalid value: "{shown}": {rule["message"]}')


def unknown(schema: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """The paths of fields that the schema does not name: dropped by the API server, refused when it is strict."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown(schema.get("items", {}), item, f"{path}[{index}]")
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    for key, item in value.items():
        place = f"{path}.{key}" if path else key
        below = _below(schema, key)
        if below is None:
            yield place
        else:
            yield from unknown(below, item, place)


def pruned(schema: Mapping[str, Any], value: Any) -> Any:
    """A copy without what `unknown` names."""
    if isinstance(value, list):
        return [pruned(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    known = ((key, item, _below(schema, key)) for key, item in value.items())
    return {key: pruned(below, item) for key, item, below in known if below is not None}


def filled_in(schema: Mapping[str, Any], value: Any) -> Any:
    """A copy with the defaults of absent fields."""
    if isinstance(value, list):
        return [filled_in(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: filled_in(_below(schema, key) or {}, item) for key, item in value.items()}
    for key, below in schema.get("properties", {}).items():
        if key not in result and "default" in below:
            result[key] = below["default"]
    return result


def _below(schema: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    properties = schema.get("properties", {})
    if key in properties:
        found: Mapping[str, Any] = properties[key]
        return found
    rest = schema.get("additionalProperties")
    return rest if isinstance(rest, dict) else None


def _object_problems(schema: Mapping[str, Any], value: Any, old: Any, path: str) -> Iterator[Problem]:
    for key in schema.get("required", []):
        if key not in value:
            yield Problem("FieldValueRequired", f"{path}.{key}" if path else key, "Required value")
    for key, item in value.items():
        below = _below(schema, key)
        if below is not None:
            yield from problems(below, item, old.get(key), f"{path}.{key}" if path else key)


def _value_problems(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[Problem]:
    if "enum" in schema and value not in schema["enum"]:
        names = ", ".join(f'"{name}"' for name in schema["enum"])
        yield Problem("FieldValueNotSupported", path, f'Unsupported value: "{value}": supported values: {names}')
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        message = f"Invalid value: \"{value}\": {path} in body should match '{schema['pattern']}'"
        yield Problem("FieldValueInvalid", path, message)
    if "minimum" in schema and isinstance(value, (int, float)) and value < schema["minimum"]:
        message = f"Invalid value: {value}: {path} in body should be greater than or equal to {schema['minimum']}"
        yield Problem("FieldValueInvalid", path, message)
    if "maximum" in schema and isinstance(value, (int, float)) and value > schema["maximum"]:
        message = f"Invalid value: {value}: {path} in body should be less than or equal to {schema['maximum']}"
        yield Problem("FieldValueInvalid", path, message)
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        message = f"Invalid value: {len(value)}: {path} in body should have at least {schema['minItems']} items"
        yield Problem("FieldValueInvalid", path, message)
    if schema.get("format") == "int32" and isinstance(value, int) and not -(2**31) <= value < 2**31:
        yield Problem("FieldValueInvalid", path, f"Invalid value: {value}: {path} in body must be of type int32")


def _has_type(schema: Mapping[str, Any], value: Any) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, (int, str)) and not isinstance(value, bool)
    if value is None:
        return bool(schema.get("nullable"))
    if isinstance(value, bool):
        return schema.get("type") in ("boolean", None)
    return "type" not in schema or isinstance(value, _TYPES[schema["type"]])


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    return (
        next(name for name, kind in reversed(_TYPES.items()) if isinstance(value, kind) and name != "number")
        if not isinstance(value, float)
        else "number"
    )
