"""The Kubernetes objects of a run, from a job file or from rendered manifests."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import yaml
from elastic_cluster.kube.checks import admission, schema
from elastic_cluster.kube.client.api import Manifest
from elastic_cluster.kube.manifests.labels import run_of

from elastic.core.errors import UsageError
from elastic_jobs.commands.kube.render import about, prepare
from elastic_jobs.job_file.load import load_job


@dataclass(frozen=True)
class KubeRun:
    """`notes` are remarks for the user, one sentence each."""

    run_id: str
    manifests: list[Manifest]
    notes: tuple[str, ...] = ()


def load(options: argparse.Namespace, context_namespace: str) -> KubeRun:
    """From a job file, or from the output of `elastic kube render` ("-" is stdin). Raises UsageError.

    The namespace is the user's option, else the file's own, else the context's.
    """
    documents = _documents(options.job)
    if any(isinstance(document, dict) and "kind" in document for document in documents):
        return from_documents(documents, options.job, options.namespace, context_namespace)
    if options.job == "-":
        raise UsageError(
            "stdin has no Kubernetes objects; a job must be given as a file, because its paths are relative to it"
        )
    section = load_job(options.job).kubernetes
    own = section is not None and "namespace" in section.model_fields_set
    namespace = options.namespace or (None if own else context_namespace)
    job, rendered = prepare(argparse.Namespace(**{**vars(options), "namespace": namespace}))
    return KubeRun(job.run_id, rendered, tuple(about(job, rendered)))


def from_documents(documents: list[Any], name: str, told: str | None, context_namespace: str) -> KubeRun:
    """Objects without a namespace get this one. Raises UsageError if they do not belong to one run."""
    found: list[Manifest] = []
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
            raise UsageError(
                f"{name}: document {number} is not a Kubernetes object: it lacks apiVersion, kind or metadata"
            )
        metadata = {"namespace": told or context_namespace, **document["metadata"]}
        if told is not None and metadata["namespace"] != told:
            # Other objects may refer to the namespace, in places that only the renderer knows.
            own = metadata["namespace"]
            raise UsageError(
                f"{name}: document {number} is for namespace {own}: render it again with --namespace {told}"
            )
        found.append({**document, "metadata": metadata})
        _check_operator(found[-1], name)
    runs = {run_of(manifest) for manifest in found}
    if len(runs) != 1 or None in runs:
        raise UsageError(f"{name}: all objects must carry the labels of one run, as `elastic kube render` writes them")
    return KubeRun(str(runs.pop()), found)


def _check_operator(manifest: Manifest, name: str) -> None:
    """Raises UsageError for what the cluster would accept and its operator would refuse later.

    Schema problems are left to the cluster: its KubeRay may be newer than our schema.
    """
    if any(schema.problems(manifest)):
        return
    for rule in admission.RULES:
        for problem in rule(manifest):
            raise UsageError(f"{name}: {manifest['kind']} {manifest['metadata'].get('name')}: {problem}")


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
