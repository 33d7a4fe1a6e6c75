"""elastic kube status: the state of one run or of all runs, as Kubernetes reports it."""

from __future__ import annotations

import argparse

from elastic_cluster.kube.client.runs import find_runs, look
from elastic_cluster.kube.client.status import RunStatus

from elastic.observe.text import clean, table
from elastic_jobs.kube.session import command, connected, place_arguments, result
from elastic_jobs.terminal import put, put_json, say

HELP = "show a run on Kubernetes with its pods, or list all runs of the namespace; exits with the run's own code"
EXAMPLE = "elastic kube status gpt --namespace team"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="run id (default: list all)")
    place_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per run and line")


def run(options: argparse.Namespace) -> int:
    with connected(options) as (cluster, namespace):
        found = find_runs(cluster, namespace) if options.run is None else [look(cluster, options.run, namespace)]
    if options.json:
        for status in found:
            put_json(status.to_json())
    elif options.run is None:
        _show_list(found, namespace)
    else:
        _show(found[0])
    if options.run is None:
        return 0
    say(f"Next: {_next(options, found[0])}")
    return result(found[0])


def _show_list(found: list[RunStatus], namespace: str) -> None:
    if not found:
        say(f"there are no runs in namespace {namespace}. Next: elastic kube apply job.yaml --namespace {namespace}")
    for line in table([{"run": each.run, "kind": each.kind, "state": each.state, "": each.reason} for each in found]):
        put(line)


def _show(status: RunStatus) -> None:
    put(f"run {status.run} ({status.kind} {status.name} in {status.namespace}) is {status.state}")
    if status.reason:
        put(f"  {clean(status.reason)}")
    if status.workers is not None:
        ready, wanted, most = status.workers
        put(f"  workers: {ready} ready, {wanted} wanted, {most} at most")
    if status.failures:
        put(f"  attempts that failed: {status.failures}")
    rows = [{"pod": p.name, "group": p.group, "phase": p.phase, "problem": clean(p.problem)} for p in status.pods]
    for line in table(rows):
        put(f"  {line}")


def _next(options: argparse.Namespace, status: RunStatus) -> str:
    if status.over:
        return command(options, "delete", options.run)
    return command(options, "logs", options.run, "-f")
