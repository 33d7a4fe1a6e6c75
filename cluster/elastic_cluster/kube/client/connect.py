"""From a kubeconfig, or the service account of the pod that this runs in, to a client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kubernetes import client, config
from yaml import YAMLError

from elastic_cluster.kube.client.api import Limits
from elastic_cluster.kube.client.errors import KubeDenied, KubeRefused
from elastic_cluster.kube.client.official import OfficialClient

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_HOME = "~/.kube/config"
_FALLBACK_NAMESPACE = "default"


def connect(context: str | None = None, limits: Limits | None = None) -> OfficialClient:
    """By $KUBECONFIG, else ~/.kube/config, else the pod's own service account. Sends nothing yet. Raises KubeError."""
    settings = client.Configuration()
    # The library's own retries write a warning for each, and repeat what we would rather say at once.
    settings.retries = False
    files = os.environ.get("KUBECONFIG") or os.path.expanduser(_HOME)
    if any(os.path.exists(file) for file in files.split(os.pathsep) if file):
        namespace, name = _from_file(settings, files, context)
    elif _IN_CLUSTER.exists() and context is None:
        namespace, name = _from_pod(settings)
    else:
        raise KubeRefused(f"there is no kubeconfig at {files}: set KUBECONFIG, or log in to your cluster first")
    where = f"the Kubernetes API at {settings.host}" + (f" (context {name})" if name else "")
    return OfficialClient(client.ApiClient(settings), namespace, where, limits or Limits())


def _from_file(settings: Any, files: str, context: str | None) -> tuple[str, str]:
    try:
        contexts, active = config.list_kube_config_contexts(files)
        names = sorted(str(found["name"]) for found in contexts)
        if context is not None and context not in names:
            raise KubeRefused(f"there is no context {context!r} in {files}; there are: {', '.join(names) or 'none'}")
        chosen = next(found for found in contexts if found["name"] == context) if context is not None else active
        # persist_config writes refreshed credentials back into the user's file; that is the login tool's business.
        config.load_kube_config(files, chosen["name"], settings, persist_config=False)
    except config.ConfigException as error:
        raise KubeRefused(f"the kubeconfig {files} cannot be used: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, YAMLError) as error:
        raise KubeRefused(f"the kubeconfig {files} cannot be read: {type(error).__name__}: {error}") from error
    return str(chosen["context"].get("namespace") or _FALLBACK_NAMESPACE), str(chosen["name"])


def _from_pod(settings: Any) -> tuple[str, str]:
    try:
        config.load_incluster_config(settings)
        return _IN_CLUSTER.read_text().strip() or _FALLBACK_NAMESPACE, ""
    except (config.ConfigException, OSError) as error:
        raise KubeDenied(f"this pod's service account cannot be used: {error}") from error
