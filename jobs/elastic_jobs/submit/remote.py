"""Shared by the commands that reach a run through the Jobs API: finding it, and following it."""

from __future__ import annotations

import argparse
import os
from typing import Any

from elastic.core.errors import UsageError
from elastic_jobs.exit_codes import NOT_FINISHED, exit_code, status_of
from elastic_jobs.run_folder import RunFolder, default_storage
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import printable
from elastic_jobs.submit import attempts
from elastic_jobs.submit.attempts import JobState, Outcome, Run, Verdict
from elastic_jobs.submit.driver_protocol import LogReader
from elastic_jobs.submit.jobs_api import JobsApi, Unreachable
from elastic_jobs.submit.supervision import Supervision
from elastic_jobs.terminal import put, put_json, say

# Ray's own name for it.
ENVIRONMENT = "RAY_API_SERVER_ADDRESS"


def is_jobs_address(address: str | None) -> bool:
    """http(s) is the Jobs API; anything else is the address of a Ray cluster for drivers."""
    return address is not None and address.startswith(("http://", "https://"))


def jobs_address(options: argparse.Namespace) -> str | None:
    """The address at which a command looks for a run: --address, else the environment's Jobs server, unless the run
    is in storage (--storage is given, or the default storage has a run of that id)."""
    address: str | None = options.address
    server = os.environ.get(ENVIRONMENT)
    if address is not None or server is None or options.storage is not None:
        return address
    kept = RunFolder(default_storage(None), options.run).read("job.json") is not None
    return None if kept else server


def jobs_address_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", metavar="URL", default=os.environ.get(ENVIRONMENT),
        help=f"the Jobs server, as http://HOST:8265 (default ${ENVIRONMENT})",
    )  # fmt: skip


def open_api(backend: Backend, address: str | None) -> JobsApi:
    """Raises UsageError for an address that is not a Jobs server's, and what `Backend.jobs_api` raises."""
    if address is None:
        raise UsageError(f"name the cluster's Jobs server: --address http://HOST:8265, or ${ENVIRONMENT}")
    if not is_jobs_address(address):
        raise UsageError(f"--address {address}: the Jobs server's address looks like http://HOST:8265")
    if "@" in address:
        raise UsageError("--address must not hold a password: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH instead")
    try:
        return backend.jobs_api(address)
    except Unreachable as error:
        # If the server has never answered, its address may be wrong.
        raise UsageError(error.message) from error


def follow(api: JobsApi, name: str, address: str, as_json: bool) -> int:
    """Prints the run's log until it ends; returns its exit code. Ctrl-C detaches. Raises RunNotFound."""
    show = say if as_json else put
    supervision = Supervision(api, lambda line: show(printable(line)), say)
    try:
        run = supervision.find(name)
        outcome = supervision.supervise(run)
    except KeyboardInterrupt:
        say(f"detached; run {name} continues. {how_to_come_back(name, address)}")
        return NOT_FINISHED
    except Unreachable as error:
        say(f"{error}; run {name} may still be running. {how_to_come_back(name, address)}")
        return NOT_FINISHED
    return conclude(run.run_id, outcome, address, as_json)


def conclude(run_id: str, outcome: Outcome, address: str, as_json: bool) -> int:
    if as_json:
        put_json(outcome_json(run_id, outcome))
    reason = f": {printable(outcome.reason)}" if outcome.reason else ""
    say(f"run {run_id} is {describe(outcome)}{reason}")
    if outcome.exit_code != exit_code("finished"):
        say(f"continue it:  elastic resume {run_id} --address {address}")
    return outcome.exit_code


def outcome_json(run_id: str, outcome: Outcome) -> dict[str, Any]:
    return {"run_id": run_id, "status": describe(outcome), "exit_code": outcome.exit_code, "reason": outcome.reason}


def describe(outcome: Outcome) -> str:
    if outcome.verdict is Verdict.RUNNING:
        return "running"
    return "without a driver" if outcome.verdict is Verdict.LOST else status_of(outcome.exit_code)


def how_to_come_back(run_id: str, address: str) -> str:
    return (
        f"Come back with:  elastic logs {run_id} -f --address {address}  "
        f"or end it with:  elastic stop {run_id} --address {address}"
    )


def find_run(api: JobsApi, name: str) -> Run:
    """By run id or submission id. Raises RunNotFound."""
    return attempts.find(api.records(), name)


def looked_at(api: JobsApi, run: Run) -> Outcome:
    """The outcome of the newest attempt; its log is read only where it is decisive."""
    log, record = LogReader(), run.newest
    outcome = attempts.judge(record, began=False, told=None)
    if record.state.ended and record.state is not JobState.SUCCEEDED:
        for piece in api.tail(record.submission_id, 0, ended=True):
            log.feed(piece)
        log.close()
        outcome = attempts.judge(record, log.began, log.told)
    return outcome
