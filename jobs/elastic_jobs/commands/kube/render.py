"""elastic kube render: a job as manifests for KubeRay, checked without a cluster."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from elastic_cluster.kube.manifests.job import KubeJob

from elastic_jobs.job_file.load import load_job
from elastic_jobs.kube.job import kube_job, manifests
from elastic_jobs.output_file import write_whole
from elastic_jobs.terminal import put, put_json, say

HELP = "print a job as manifests for KubeRay, checked without a cluster"
EXAMPLE = "elastic kube render examples/kubernetes.yaml --namespace team -o gpt.yaml"


def arguments(parser: argparse.ArgumentParser) -> None:
    job_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with the list of manifests instead of YAML"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of printing")


def job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every subcommand that takes a job file."""
    parser.add_argument("job", metavar="JOB.yaml", help="the job file, with a 'kubernetes' section")
    parser.add_argument("--run-id", metavar="ID", help="the run's name (default: the job's name)")
    parser.add_argument("--namespace", metavar="NS", help="default: the job's 'kubernetes.namespace'")
    parser.add_argument("--image", metavar="IMAGE", help="default: the job's 'kubernetes.image'")
    parser.add_argument(
        "--cluster", action="store_true", help="a RayCluster that stays, instead of a RayJob that ends with the run"
    )


def prepare(options: argparse.Namespace) -> tuple[KubeJob, list[dict[str, Any]]]:
    """The job and its manifests, checked. Raises UsageError; writes nothing and contacts no cluster."""
    file = Path(options.job)
    spec = load_job(file)
    job = kube_job(
        spec,
        file,
        run_id=options.run_id,
        namespace=options.namespace,
        image=options.image,
        as_cluster=options.cluster,
    )
    return job, manifests(job)


def run(options: argparse.Namespace) -> int:
    job, rendered = prepare(options)
    if options.output is not None:
        write_whole(options.output, as_json(job, rendered) if options.json else as_yaml(rendered))
    elif options.json:
        put_json({"run_id": job.run_id, "manifests": rendered})
    else:
        put(as_yaml(rendered).rstrip("\n"))
    for line in about(job, rendered):
        say(line)
    say(f"Next: {shlex.join(_apply(options))}")
    return 0


def _apply(options: argparse.Namespace) -> list[str]:
    """The command that applies the written file, or else the same job."""
    if options.output is not None:
        return ["elastic", "kube", "apply", options.output, "--dry-run"]
    words = ["elastic", "kube", "apply", options.job]
    for name in ("run_id", "namespace", "image"):
        if getattr(options, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return [*words, *(["--cluster"] if options.cluster else []), "--dry-run"]


def as_yaml(rendered: Sequence[Mapping[str, Any]]) -> str:
    """One document per object, in the given order."""
    return yaml.dump_all(rendered, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)


def as_json(job: KubeJob, rendered: Sequence[Mapping[str, Any]]) -> str:
    import json

    return json.dumps({"run_id": job.run_id, "manifests": rendered}) + "\n"


def about(job: KubeJob, rendered: Sequence[Mapping[str, Any]]) -> list[str]:
    """Remarks for the user about the rendered objects."""
    kinds = ", ".join(f"{manifest['kind']} {manifest['metadata']['name']}" for manifest in rendered)
    lines = [f"run {job.run_id} in namespace {job.namespace}: {kinds}"]
    if job.control_store.kind == "rocksdb":
        lines.append("the operator accepts this only with its feature gate GCSFaultToleranceEmbeddedStorage enabled")
    if job.control_store.kind == "none" and not job.as_cluster:
        lines.append(
            "no 'control_store': if the head pod is lost, a new cluster resumes from the newest checkpoint in storage"
        )
    return lines


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as block scalars, and no anchors or aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
