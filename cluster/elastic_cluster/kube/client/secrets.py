"""Secrets: references in the objects, the token Secret that is created here, and redaction before output."""

from __future__ import annotations

import base64
import secrets as random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_cluster.kube.client.api import Manifest, Ref
from elastic_cluster.kube.manifests.labels import labels

# KubeRay reads the token of `authOptions.secretName` from this key.
TOKEN_KEY = "auth_token"
HIDDEN = "***"
_TOKEN_BYTES = 32


@dataclass(frozen=True, order=True)
class SecretUse:
    """`token` is set for the Ray token's, which is made when it is missing."""

    name: str
    token: bool = False


def token_secret(name: str, namespace: str, run_id: str) -> Manifest:
    """A new random token, 32 bytes in base64 as KubeRay makes its own. It is kept nowhere but in the cluster."""
    value = base64.b64encode(random.token_bytes(_TOKEN_BYTES)).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": labels(run_id)},
        "type": "Opaque",
        "stringData": {TOKEN_KEY: value},
    }


def uses(manifests: list[Manifest]) -> list[SecretUse]:
    """Every secret without which a pod of these objects would not start, in the order of their names."""
    own = {Ref.of(manifest).name for manifest in manifests if manifest["kind"] == "Secret"}
    found = {use for manifest in manifests for use in _uses(manifest) if use.name not in own}
    tokens = {use.name for use in found if use.token}
    return sorted(use for use in found if use.token or use.name not in tokens)


def redacted(value: Any) -> Any:
    """A copy without literal values of environment variables, contents of secrets, and runtime environments."""
    if isinstance(value, list):
        return [redacted(item) for item in value]
    if not isinstance(value, dict):
        return value
    secret = value.get("kind") == "Secret"
    return {key: _hidden(key, item) if secret or key in _LITERAL else redacted(item) for key, item in value.items()}


# Where literal values are: lists of {"name", "value"}, text with env_vars in it, the copy that `kubectl apply` leaves.
_LITERAL = {"env", "runtimeEnvYAML", "annotations"}
_COPY = "kubectl.kubernetes.io/last-applied-configuration"


def _hidden(key: str, value: Any) -> Any:
    if key in ("data", "stringData") and isinstance(value, dict):
        return dict.fromkeys(value, HIDDEN)
    if key == "env" and isinstance(value, list):
        return [{**entry, "value": HIDDEN} if "value" in entry else entry for entry in value]
    if key == "annotations" and isinstance(value, dict):
        return {name: HIDDEN if name == _COPY else text for name, text in value.items()}
    return HIDDEN if key == "runtimeEnvYAML" else redacted(value)


def _uses(value: Any) -> Iterator[SecretUse]:
    if isinstance(value, list):
        for item in value:
            yield from _uses(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if isinstance(item, dict) and not item.get("optional"):
            name = _named(key, item)
            if name is not None:
                yield SecretUse(name, token=key == "authOptions")
        if key == "imagePullSecrets" and isinstance(item, list):
            yield from (SecretUse(str(entry["name"])) for entry in item if "name" in entry)
        yield from _uses(item)


def _named(key: str, item: Mapping[str, Any]) -> str | None:
    match key:
        case "secretKeyRef" | "secretRef":
            name = item.get("name")
        case "secret" | "authOptions":
            name = item.get("secretName")
        case _:
            name = None
    return str(name) if name else None
