"""The objects of a run, from a file."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.kube.api import Manifest
from cluster.kube.labels import run_of
from elastic.core.errors import UsageError


@dataclass(frozen=True)
class KubeRun:
    run_id: str
    manifests: list[Manifest]


def load(options: argparse.Namespace, namespace: str) -> KubeRun:
    """Rendered manifests of one run (`elastic kube render`), from a file or stdin. Raises UsageError."""
    return from_documents(_documents(options.job), options.job, namespace)


def from_documents(documents: list[Any], name: str, namespace: str) -> KubeRun:
    """Each gets the namespace, unless it names one. Raises UsageError when they are not of one run."""
    found: list[Manifest] = []
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
            raise UsageError(f"{name}: document {number} is no Kubernetes object (apiVersion, kind, metadata)")
        metadata = {"namespace": namespace, **document["metadata"]}
        found.append({**document, "metadata": metadata})
    runs = {run_of(manifest) for manifest in found}
    if len(runs) != 1 or None in runs:
        raise UsageError(f"{name}: all objects must carry the labels of one run, as `elastic kube render` writes them")
    return KubeRun(str(runs.pop()), found)


def _documents(file: str) -> list[Any]:
    try:
        if file == "-":
            text = sys.stdin.read()
        else:
            with open(file, encoding="utf-8") as opened:
                text = opened.read()
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
