"""elastic status: the state of one run: a submitted run with its attempts, any other by its journal."""

from __future__ import annotations

import argparse
import time

from elastic.observe.text import clean, date, duration, table
from elastic_jobs.commands.common import folder_of, storage_argument
from elastic_jobs.exit_codes import STATUSES, exit_code
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import read_summary, show
from elastic_jobs.running.live import how_to_come_back as how_to_follow
from elastic_jobs.running.live import read_live
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

HELP = "show the state of a run, with the run's own exit code (101 while it runs)"
EXAMPLE = "elastic status gpt-20260102-030405-ab12 --address http://10.0.0.5:8265"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, or the submission id of one of its attempts")
    jobs_address_argument(parser)
    storage_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, without values of environment variables")


def run(options: argparse.Namespace, backend: Backend) -> int:
    if options.address is None or options.storage is not None:
        return _stored(options)
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


def _stored(options: argparse.Namespace) -> int:
    """A run that `elastic run` started, by its folder in storage."""
    folder = folder_of(options)
    folder.job_record()
    summary = {**read_summary(folder), "run_id": folder.run_id}
    show(summary, options.json)
    if summary.get("status") in STATUSES:
        say(f"its history:  elastic story {folder.run_id} --storage {folder.url}")
    elif read_live(folder) is not None:
        say(how_to_follow(folder, None))
    else:
        say(f"its journal has no end; if it is not running:  elastic resume {folder.run_id} --storage {folder.url}")
    return exit_code(summary.get("status"))


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
    if verdict is Verdict.RUNNING:
        return how_to_come_back(run_id, address)
    if verdict is Verdict.LOST:
        return f"give it a driver again:  elastic logs {run_id} -f --address {address}"
    return f"its history:  elastic story {run_id} --storage {clean(run.storage_url or 'URL')}"
