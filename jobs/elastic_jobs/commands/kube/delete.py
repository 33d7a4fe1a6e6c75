"""elastic kube delete: a run's objects, and nothing else."""

from __future__ import annotations

import argparse

from elastic_cluster.kube.client.runs import delete_run

from elastic_jobs.commands.common import positive
from elastic_jobs.exit_codes import NOT_FINISHED
from elastic_jobs.kube.session import command, connected, place_arguments
from elastic_jobs.terminal import put, put_json, say

HELP = "delete a run from Kubernetes: stop its job, then delete every object that carries its labels"
EXAMPLE = "elastic kube delete gpt --namespace team"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id")
    parser.add_argument(
        "--timeout", type=positive, default=300, metavar="S", help="how long to wait for the deletion (default 300)"
    )
    parser.add_argument("--volumes", action="store_true", help="delete the volumes of the run's control store too")
    place_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the deleted and the remaining objects as JSON")


def run(options: argparse.Namespace) -> int:
    with connected(options) as (cluster, namespace):
        deleted = delete_run(cluster, options.run, namespace, options.timeout, volumes=options.volumes, say=say)
    names = [f"{ref.kind}/{ref.name}" for ref in deleted.gone]
    if options.json:
        put_json({"run": options.run, "deleted": names, "left": list(deleted.left)})
    else:
        for name in names:
            put(f"{name} deleted")
    if deleted.left:
        say(f"after {options.timeout} s still not deleted: {', '.join(deleted.left)}; the deletion continues")
        say(f"Next: {command(options, 'status', options.run)}")
        return NOT_FINISHED
    say(f"run {options.run} is deleted; its checkpoints are kept. Next: {command(options, 'apply', 'job.yaml')}")
    return 0
