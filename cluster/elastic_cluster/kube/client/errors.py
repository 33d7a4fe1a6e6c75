"""What Kubernetes answers, as one sentence that says what to do.

ClusterError
`-- KubeError              the cluster did not answer as it should
    |-- KubeRefused        for the user: the object, the configuration or the call must change
    |   |-- AlreadyThere   there is an object of that name
    |   `-- Conflict       a field belongs to another manager
    |-- KubeNotFound       no such run
    |-- KubeDenied         for the administrator: permissions, a missing or old KubeRay
    |-- KubeQuota          for the administrator: no room in the namespace
    |-- KubeUnavailable    no action: retried, then reported
    `-- KubeStale          no action: the watch is restarted
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from elastic_cluster.kube.client.api import Ref
from elastic_cluster.source import ClusterError

_CANNOT = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_WEBHOOK = re.compile(r'admission webhook "(?P<name>[^"]+)" denied the request:?\s*(?P<why>.*)', re.DOTALL)
_UNKNOWN_FIELD = re.compile(r'unknown field "([^"]+)"')
_MANAGER = re.compile(r'conflict with "([^"]+)"')
_LONGEST = 600


class KubeError(ClusterError):
    pass


class KubeRefused(KubeError):
    pass


class AlreadyThere(KubeRefused):
    pass


class Conflict(KubeRefused):
    pass


class KubeNotFound(KubeError):
    pass


class KubeDenied(KubeError):
    pass


class KubeQuota(KubeError):
    pass


class KubeUnavailable(KubeError):
    pass


class KubeStale(KubeError):
    pass


def explain(status: int, body: str | bytes | None, what: Ref, verb: str, where: str) -> KubeError:
    """The error for an HTTP status and the `Status` object that came with it. `verb` is the API's: "patch", "list"."""
    answer = _status(body)
    message = str(answer.get("message") or "").strip()
    match status:
        case 401:
            return KubeDenied(f"{where} does not accept these credentials: log in again and repeat the command")
        case 403:
            return _forbidden(message, what, verb)
        case 404:
            return _not_found(answer, what)
        case 409:
            return _conflict(answer, message, what)
        case 400 | 422:
            return _invalid(answer, message, what)
        case 410:
            return KubeStale(f"{where} has forgotten since when {what} was watched")
        case 413:
            return KubeRefused(f"{what} is too large for {where}: {_short(message) or 'put less into it'}")
        case 429 | 500 | 502 | 503 | 504:
            return KubeUnavailable(f"{where} could not {verb} {what} (HTTP {status}): {_short(message) or 'no reason'}")
        case _:
            return KubeError(f"{where} answered HTTP {status} to {verb} {what}: {_short(message) or 'no reason'}")


def missing_kind(what: Ref, groups: Mapping[str, list[str]], where: str) -> KubeError:
    """For a kind that the cluster does not serve. `groups` are those that it serves, with their versions."""
    group, _, version = what.api_version.rpartition("/")
    if group == "ray.io" and group not in groups:
        return KubeDenied(
            f"KubeRay is not installed in {where} (no API group ray.io): install its operator, 1.7 or later"
        )
    if group == "ray.io" and version not in groups[group]:
        served = ", ".join(groups[group])
        return KubeDenied(f"KubeRay in {where} is too old: it serves ray.io/{served}, and ray.io/{version} is needed")
    return KubeDenied(f"{where} does not serve {what.api_version} {what.kind}, which this run needs")


def _forbidden(message: str, what: Ref, verb: str) -> KubeError:
    if found := _CANNOT.search(message):
        resource = found["resource"] + (f".{found['group']}" if found["group"] else "")
        place = f" in namespace {found['namespace']}" if found["namespace"] else " in the whole cluster"
        check = f"kubectl auth can-i {found['verb']} {resource}" + (
            f" -n {found['namespace']}" if found["namespace"] else ""
        )
        return KubeDenied(
            f"{found['user']} may not {found['verb']} {resource}{place}: "
            f"ask for a Role with that verb (`{check}` tells whether it is there)"
        )
    if "exceeded quota" in message:
        why = _short(message[message.index("exceeded quota") :])
        return KubeQuota(f"namespace {what.namespace} has no room for {what.kind} {what.name}: {why}")
    if "because it is being terminated" in message:
        return KubeRefused(f"namespace {what.namespace} is being deleted: choose another with --namespace")
    if refused := _webhook(message, what):
        return refused
    return KubeDenied(f"{verb} {what} is forbidden: {_short(message) or 'no reason'}")


def _not_found(answer: Mapping[str, Any], what: Ref) -> KubeError:
    details = answer.get("details") or {}
    if details.get("kind") == "namespaces":
        return KubeRefused(
            f"there is no namespace {what.namespace}: `kubectl create namespace {what.namespace}`, or choose another "
            "with --namespace"
        )
    return KubeNotFound(f"there is no {what}")


def _conflict(answer: Mapping[str, Any], message: str, what: Ref) -> KubeError:
    if answer.get("reason") == "AlreadyExists":
        return AlreadyThere(f"there is already a {what}")
    causes = [cause for cause in _causes(answer) if cause.get("reason") == "FieldManagerConflict"]
    if causes:
        managers = {found[1] for cause in causes if (found := _MANAGER.search(str(cause.get("message"))))}
        fields = ", ".join(str(cause.get("field")) for cause in causes[:3]) + (", ..." if len(causes) > 3 else "")
        return Conflict(
            f"{fields} of {what} was set by {', '.join(sorted(managers)) or 'somebody else'}: leave it as it is, "
            "or take it over with --force"
        )
    return Conflict(f"{what} was changed by somebody else at the same time: repeat the command ({_short(message)})")


def _invalid(answer: Mapping[str, Any], message: str, what: Ref) -> KubeError:
    if refused := _webhook(message, what):
        return refused
    if unknown := _UNKNOWN_FIELD.findall(message):
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        old = ": its CRDs are older than KubeRay 1.7, or the field is misspelt" if what.group == "ray.io" else ""
        return KubeRefused(f"the cluster does not know the field {unknown[0]} of {what.kind} {what.name}{more}{old}")
    causes = _causes(answer)
    if what.kind == "Secret":
        # The API quotes the values that it refuses.
        message = "its " + ", ".join(str(cause.get("field")) for cause in causes) if causes else "its contents"
    elif causes:
        message = f"{causes[0].get('field')}: {causes[0].get('message')}"
        message += f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return KubeRefused(f"{what} is not valid: {_short(message)}")


def _webhook(message: str, what: Ref) -> KubeError | None:
    found = _WEBHOOK.search(message)
    return (
        KubeRefused(f"the admission webhook {found['name']} refuses {what}: {_short(found['why'])}") if found else None
    )


def _causes(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((answer.get("details") or {}).get("causes") or [])


def _status(body: str | bytes | None) -> Mapping[str, Any]:
    """A proxy may answer with any body; anything but a `Status` becomes the message."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        answer = json.loads(text)
    except ValueError:
        return {"message": text}
    return answer if isinstance(answer, dict) else {"message": text}


def _short(message: str) -> str:
    """One line, and not the whole object, which some messages quote."""
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
