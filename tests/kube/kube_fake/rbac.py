"""Who may do what, from the Roles and RoleBindings in the table, as the API server's RBAC authorizer decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kube_fake.resources import Place

ADMIN = "admin"


def allowed(
    user: str, verb: str, place: Place, roles: Iterable[Mapping[str, Any]], bindings: Iterable[Mapping[str, Any]]
) -> bool:
    """`roles` and `bindings` are those of the place's namespace. The administrator may do everything."""
    if user == ADMIN:
        return True
    named = {binding["roleRef"]["name"] for binding in bindings if any(map(user.__eq__, _subjects(binding)))}
    rules = [rule for role in roles if role["metadata"]["name"] in named for rule in role.get("rules", [])]
    resource = place.resource.plural + (f"/{place.subresource}" if place.subresource else "")
    return any(
        _has(rule["verbs"], verb)
        and _has(rule.get("apiGroups", []), place.resource.group)
        and _has(rule.get("resources", []), resource)
        and ("resourceNames" not in rule or place.name in rule["resourceNames"])
        for rule in rules
    )


def sentence(user: str, verb: str, place: Place) -> str:
    """As the API server words its refusal."""
    resource = place.resource.plural + (f"/{place.subresource}" if place.subresource else "")
    where = f' in the namespace "{place.namespace}"' if place.namespace else " at the cluster scope"
    name = f' "{place.name}"' if place.name else ""
    return (
        f'{place.resource.qualified}{name} is forbidden: User "{user}" cannot {verb} resource "{resource}" '
        f'in API group "{place.resource.group}"{where}'
    )


def _subjects(binding: Mapping[str, Any]) -> list[str]:
    return [
        f"system:serviceaccount:{each['namespace']}:{each['name']}"
        if each["kind"] == "ServiceAccount"
        else each["name"]
        for each in binding.get("subjects", [])
    ]


def _has(names: Iterable[str], name: str) -> bool:
    return "*" in names or name in names
