"""elastic kube apply: all objects of a run, or none."""

from __future__ import annotations

import argparse

from cluster.kube.apply import Applied, apply_run
from cluster.kube.secrets import redacted
from jobs.kube import command, connected, place_arguments
from jobs.kube_manifests import load
from jobs.terminal import put, put_json, say

HELP = "create or update a run on Kubernetes; every object is tried in a server-side dry run first"
EXAMPLE = "elastic kube apply job.yaml --namespace team"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="FILE", help="rendered manifests; - for stdin")
    parser.add_argument("--dry-run", action="store_true", help="stop after the server-side dry run")
    parser.add_argument("--force", action="store_true", help="take over fields that others have set")
    place_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line, without secrets")


def run(options: argparse.Namespace) -> int:
    with connected(options) as (cluster, namespace):
        job = load(options, namespace)
        done = apply_run(cluster, job.run_id, job.manifests, dry_run=options.dry_run, force=options.force)
    for applied in done:
        _show(applied, options)
    if options.dry_run:
        say(f"run {job.run_id} would be accepted; nothing was changed. Next: {command(options, 'apply', options.job)}")
    else:
        say(f"run {job.run_id} is applied. Next: {command(options, 'logs', job.run_id, '-f')}")
    return 0


def _show(applied: Applied, options: argparse.Namespace) -> None:
    ref = applied.ref
    if not options.json:
        put(f"{ref.kind}/{ref.name} {applied.outcome}{' (dry run)' if options.dry_run else ''}")
        return
    entry = {"kind": ref.kind, "name": ref.name, "namespace": ref.namespace, "outcome": applied.outcome}
    put_json({**entry, "dry_run": options.dry_run, **({"object": redacted(applied.object)} if options.dry_run else {})})
