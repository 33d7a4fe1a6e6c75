"""elastic list: the runs that were submitted to a Ray cluster."""

from __future__ import annotations

import argparse

from elastic.core.wording import plural
from elastic.observe.text import clean, date, table
from elastic_jobs.running.backend import Backend
from elastic_jobs.submit import attempts
from elastic_jobs.submit.attempts import Run
from elastic_jobs.submit.remote import jobs_address_argument, open_api
from elastic_jobs.terminal import put, put_json, say

HELP = "list the runs that were submitted to a Ray cluster, newest first"
EXAMPLE = "elastic list --address http://10.0.0.5:8265"


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_address_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def run(options: argparse.Namespace, backend: Backend) -> int:
    found = attempts.merge(open_api(backend, options.address).records())
    if options.json:
        for run in found:
            newest = run.newest
            put_json({"run_id": run.run_id, "attempts": len(run.attempts), "newest": newest.redacted()})
    else:
        for line in table([_row(run) for run in found]):
            put(line)
    say(_next(found, options.address))
    return 0


def _row(run: Run) -> dict[str, str]:
    newest, first = run.newest, run.attempts[0]
    code = newest.exit_code if newest.state.ended else None
    return {
        "run": clean(run.run_id),
        "job": newest.state.value.lower(),
        "attempt": str(newest.attempt),
        "exit code": "-" if code is None else str(code),
        "submitted": date(first.started_at) if first.started_at else "-",
        "storage": clean(run.storage_url or "-"),
    }


def _next(found: tuple[Run, ...], address: str) -> str:
    if not found:
        return f"no run was submitted there; submit one:  elastic submit JOB.yaml --address {address}"
    return f"{plural(len(found), 'run')}; more of one:  elastic status {clean(found[0].run_id)} --address {address}"
