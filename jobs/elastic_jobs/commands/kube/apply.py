"""elastic kube apply: all objects of a run, or none."""

from __future__ import annotations

import argparse

from elastic_cluster.kube.client.apply import Applied, apply_run
from elastic_cluster.kube.client.secrets import redacted

from elastic_jobs.kube.manifests import load
from elastic_jobs.kube.session import command, connected, place_arguments
from elastic_jobs.terminal import put, put_json, say

HELP = "create or update a run on Kubernetes, after a server-side dry run of every object"
EXAMPLE = "elastic kube apply job.yaml --namespace team"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="FILE", help="a job file, or rendered manifests (- for those on stdin)")
    parser.add_argument("--run-id", metavar="ID", help="of a job file: the run's name (default: the job's name)")
    parser.add_argument("--image", metavar="IMAGE", help="of a job file: default its 'kubernetes.image'")
    parser.add_argument("--cluster", action="store_true", help="of a job file: a RayCluster that stays, without a job")
    parser.add_argument("--dry-run", action="store_true", help="stop after the server-side dry run")
    parser.add_argument("--force", action="store_true", help="take over fields that another manager has set")
    place_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line, without secrets")


def run(options: argparse.Namespace) -> int:
    with connected(options) as (cluster, _):
        job = load(options, cluster.namespace)
        for note in job.notes:
            say(note)
        place = str(job.manifests[0]["metadata"]["namespace"])
        if place != cluster.namespace:
            # The commands that we suggest must name the same namespace.
            options.namespace = place
        done = apply_run(cluster, job.run_id, job.manifests, dry_run=options.dry_run, force=options.force)
    for applied in done:
        _show(applied, options)
    if options.dry_run:
        say(f"run {job.run_id} would be accepted; nothing was changed. Next: {command(options, *_again(options))}")
    elif any(applied.ref.kind == "RayJob" for applied in done):
        say(f"run {job.run_id} is applied. Next: {command(options, 'logs', job.run_id, '-f')}")
    else:
        say(f"the cluster of run {job.run_id} is applied. Next: {command(options, 'status', job.run_id)}")
    return 0


def _again(options: argparse.Namespace) -> list[str]:
    """The same command without --dry-run."""
    words = ["apply", str(options.job)]
    for name in ("run_id", "image"):
        if getattr(options, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return [*words, *(f"--{name}" for name in ("cluster", "force") if getattr(options, name))]


def _show(applied: Applied, options: argparse.Namespace) -> None:
    ref = applied.ref
    if not options.json:
        put(f"{ref.kind}/{ref.name} {applied.outcome}{' (dry run)' if options.dry_run else ''}")
        return
    entry = {"kind": ref.kind, "name": ref.name, "namespace": ref.namespace, "outcome": applied.outcome}
    put_json({**entry, "dry_run": options.dry_run, **({"object": redacted(applied.object)} if options.dry_run else {})})
