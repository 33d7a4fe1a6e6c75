"""elastic status: one submitted run, with all its attempts."""

from __future__ import annotations

import argparse
import time

from elastic.observe.text import clean, date, duration, table
from elastic_jobs.backend import Backend
from elastic_jobs.submit.attempts import JobRecord, Run, Verdict
from elastic_jobs.submit.remote import (
    describe,
    find_run,
    how_to_come_back,
    jobs_address_argument,
    looked_at,
    open_api,
    outcome_json,
)
from elastic_jobs.terminal import put, put_json, say

HELP = "say how a submitted run goes, with the run's own exit code (101 while it goes on)"
EXAMPLE = "elastic status gpt-20260102-030405-ab12 --address http://10.0.0.5:8265"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, or the submission id of one of its attempts")
    jobs_address_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; values of environment variables are left out")


def run(options: argparse.Namespace, backend: Backend) -> int:
    api = open_api(backend, options.address)
    found = find_run(api, options.run)
    outcome = looked_at(api, found)
    if options.json:
        put_json({**outcome_json(found.run_id, outcome), "attempts": [one.redacted() for one in found.attempts]})
    else:
        put(f"run {clean(found.run_id)}: {describe(outcome)}{f', {clean(outcome.reason)}' if outcome.reason else ''}")
        put(f"kept in {clean(found.storage_url or '-')}")
        for line in table([_row(record) for record in found.attempts]):
            put(line)
    say(_next(found, outcome.verdict, options.address))
    return outcome.exit_code


def _row(record: JobRecord) -> dict[str, str]:
    until = record.ended_at or time.time()
    return {
        "attempt": clean(record.submission_id),
        "job": record.state.value.lower(),
        "exit code": "-" if record.exit_code is None else str(record.exit_code),
        "submitted": date(record.started_at) if record.started_at else "-",
        "for": duration(until - record.started_at) if record.started_at else "-",
        "node": clean(record.node or "-")[:8],
    }


def _next(run: Run, verdict: Verdict, address: str) -> str:
    run_id = clean(run.run_id)
    if verdict is Verdict.GOES_ON:
        return how_to_come_back(run_id, address)
    if verdict is Verdict.LOST:
        return f"give it a driver again:  elastic logs {run_id} -f --address {address}"
    return f"its history:  elastic story {run_id} --storage {clean(run.storage_url or 'URL')}"
