"""The objects of a run, from a job file or from manifests that have been rendered."""

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
    """`notes` are what a person should know of it."""

    run_id: str
    manifests: list[Manifest]
    notes: tuple[str, ...] = ()


def load(options: argparse.Namespace, context_namespace: str) -> KubeRun:
    """A job file, or what `elastic kube render` has made of one ("-" is stdin). Raises UsageError.

    The namespace is the one that the user tells, else the file's own, else that of the context.
    """
    documents = _documents(options.job)
    if any(isinstance(document, dict) and "kind" in document for document in documents):
        return from_documents(documents, options.job, options.namespace, context_namespace)
    if options.job == "-":
        raise UsageError("stdin has no Kubernetes objects; a job must be a file, since its paths are relative to it")
    section = load_job(options.job).kubernetes
    own = section is not None and "namespace" in section.model_fields_set
    namespace = options.namespace or (None if own else context_namespace)
    job, rendered = prepare(argparse.Namespace(**{**vars(options), "namespace": namespace}))
    return KubeRun(job.run_id, rendered, tuple(about(job, rendered)))


def from_documents(documents: list[Any], name: str, told: str | None, context_namespace: str) -> KubeRun:
    """Each gets the namespace, unless it names one. Raises UsageError when they are not of one run."""
    found: list[Manifest] = []
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
            raise UsageError(f"{name}: document {number} is no Kubernetes object (apiVersion, kind, metadata)")
        metadata = {"namespace": told or context_namespace, **document["metadata"]}
        if told is not None and metadata["namespace"] != told:
            # Other objects may name it as well, in places that only rendering knows.
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
    """The cluster would take it, and its operator would refuse it later.

    What the schema is about is left to the cluster: its KubeRay may know more than ours.
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
