"""elastic kube logs: the log of a run's driver, optionally followed to the end of the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from elastic_cluster.kube.client.logs import Follower

from elastic_jobs.exit_codes import NOT_FINISHED
from elastic_jobs.kube.session import command, connected, place_arguments, result
from elastic_jobs.running.follow import printable
from elastic_jobs.terminal import put, put_json, say

HELP = "print the log of a run on Kubernetes; exits with the run's own code"
EXAMPLE = "elastic kube logs gpt -f --namespace team"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="follow until the run has ended (Ctrl-C detaches; the run continues)",
    )
    place_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line; the last one is the result")


def run(options: argparse.Namespace) -> int:
    with connected(options) as (cluster, namespace):
        follower = Follower(cluster, options.run, namespace, _put(options.json), lambda text: say(printable(text)))
        try:
            status = follower.follow() if options.follow else follower.show()
        except KeyboardInterrupt:
            say(f"run {options.run} continues. Next: {command(options, 'logs', options.run, '-f')}")
            return NOT_FINISHED
    code = result(status)
    if options.json:
        put_json({"run": status.run, "state": status.state, "reason": status.reason, "exit_code": code})
    say(f"run {status.run} is {status.state}{': ' + printable(status.reason) if status.reason else ''}")
    if status.over:
        say(f"Next: {command(options, 'delete', options.run)}")
    else:
        say(f"Next: {command(options, 'logs', options.run, '-f')}")
    return code


def _put(as_json: bool) -> Callable[[str], None]:
    """Prints lines without colours and cursor movements: a job's log is untrusted text."""
    return (lambda line: put_json({"line": line})) if as_json else (lambda line: put(printable(line)))
