"""elastic logs: what a submitted run's drivers have said; with -f until the run is over."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from elastic_jobs.backend import Backend
from elastic_jobs.follow import printable
from elastic_jobs.submit.attempts import Run
from elastic_jobs.submit.driver_protocol import LogReader
from elastic_jobs.submit.jobs_api import JobsApi
from elastic_jobs.submit.remote import (
    find_run,
    follow,
    how_to_come_back,
    jobs_address_argument,
    looked_at,
    open_api,
    outcome_json,
)
from elastic_jobs.terminal import put, put_json, say

HELP = "print a submitted run's log; ends with the run's own exit code (101 while it goes on)"
EXAMPLE = "elastic logs gpt-20260102-030405-ab12 -f --address http://10.0.0.5:8265"

# Seconds of silence at the beginning: the Jobs server takes one before it tells anything.
_PATIENCE = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, or the submission id of one of its attempts")
    parser.add_argument(
        "-f", "--follow", action="store_true",
        help="until the run is over, whatever becomes of the connection; a lost driver is replaced",
    )  # fmt: skip
    jobs_address_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and the log on stderr")


def run(options: argparse.Namespace, backend: Backend) -> int:
    api = open_api(backend, options.address)
    if options.follow:
        return follow(api, options.run, options.address, options.json)
    found = find_run(api, options.run)
    _print(api, found, say if options.json else put)
    outcome = looked_at(api, found)
    if options.json:
        put_json(outcome_json(found.run_id, outcome))
    if not found.newest.state.ended:
        say(how_to_come_back(found.run_id, options.address))
    return outcome.exit_code


def _print(api: JobsApi, run: Run, show: Callable[[str], None]) -> None:
    """The newest attempt's log, as far as it goes."""
    log, silent = LogReader(), 0
    for piece in api.tail(run.newest.submission_id, 0, run.newest.state.ended):
        for line in log.feed(piece):
            show(printable(line))
        silent = 0 if piece else silent + 1
        if silent > (0 if log.chars else _PATIENCE):
            return
