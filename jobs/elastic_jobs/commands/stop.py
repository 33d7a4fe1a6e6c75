"""elastic stop: end a run as planned, with a last checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from elastic.core.errors import RunNotFound
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic.observe.text import outcome
from elastic_jobs.commands.common import address_argument, folder_of, run_arguments
from elastic_jobs.exit_codes import NOT_FINISHED, STATUSES
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.handle import STOP_AGAIN_S
from elastic_jobs.running.live import reach_patiently, read_live
from elastic_jobs.submit.attempts import Verdict
from elastic_jobs.submit.remote import (
    describe,
    find_run,
    how_to_come_back,
    is_jobs_address,
    jobs_address,
    looked_at,
    open_api,
    outcome_json,
)
from elastic_jobs.submit.supervision import Supervision, replace_driver, tell_to_stop
from elastic_jobs.terminal import put_json, say
from elastic_jobs.trust import trust_argument

HELP = "end a run as planned, with a last checkpoint"
EXAMPLE = "elastic stop gpt-20260102-030405-ab12 --address http://10.0.0.5:8265"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    address_argument(parser)
    trust_argument(parser)
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the run has received the request")
    parser.add_argument("--json", action="store_true", help="print the outcome of the run as JSON")


def run(options: argparse.Namespace, backend: Backend) -> int:
    """0 when the run has received the request, and has ended unless --no-wait."""
    options.address = jobs_address(options)
    if is_jobs_address(options.address):
        return _stop_job(options, backend)
    folder = folder_of(options)
    if options.address is None:
        _check_goes_on(folder)
    handle = reach_patiently(backend, folder, options.address, options.trust_storage)
    handle.stop("elastic stop")
    if options.no_wait:
        say(f"run {folder.run_id} has been told to stop")
        return 0
    while (result := handle.result(STOP_AGAIN_S)) is None:
        handle.stop("elastic stop")
    say(f"run {folder.run_id} {outcome(result.get('status'))} after step {result.get('step')}")
    if options.json:
        put_json({"run_id": folder.run_id, "status": result.get("status"), "step": result.get("step")})
    return _kept(folder.run_id, result)


def _kept(run_id: str, result: Mapping[str, Any]) -> int:
    """0 if storage holds the last step, else NOT_FINISHED and a message."""
    step, saved = result.get("step") or 0, result.get("checkpoint_step")
    if "checkpoint_step" not in result or (saved or 0) >= step:
        return 0
    held = "no checkpoint" if saved is None else f"step {saved}"
    say(
        f"storage holds {held} of run {run_id}, not step {step}: the steps after it will be done again when it is "
        f"resumed; what storage refused is in `elastic story {run_id}`"
    )
    return NOT_FINISHED


def _check_goes_on(folder: RunFolder) -> None:
    """Raises RunNotFound for an unknown run, and for one that has ended and has no controller left."""
    if read_live(folder) is not None:
        return
    folder.job_record()
    summary = summarize(JournalReader(folder.url, folder.run_id).records())
    if summary.get("status") in STATUSES:
        raise RunNotFound(
            f"run {folder.run_id!r} is not running: it is {summary['status']} since step {summary.get('steps')}; its "
            f"history: `elastic story {folder.run_id} --storage {folder.url}`"
        )


def _stop_job(options: argparse.Namespace, backend: Backend) -> int:
    """Through the Jobs API: SIGTERM to the driver, which lets the run save and end. Without a driver, one is sent."""
    api = open_api(backend, options.address)
    found = find_run(api, options.run)
    outcome = looked_at(api, found)
    if outcome.verdict is Verdict.OVER:
        raise RunNotFound(f"run {found.run_id!r} is not running: it is {describe(outcome)}")
    if outcome.verdict is Verdict.RUNNING:
        api.stop(found.newest.submission_id)
    else:
        replace_driver(api, found, "stop")
        found = find_run(api, found.run_id)
        # Another follower, unaware of the stop, may have just sent another driver.
        tell_to_stop(api, found.newest)
    say(f"run {found.run_id} has been told to stop")
    if options.no_wait:
        say(how_to_come_back(found.run_id, options.address))
        return 0
    outcome = Supervision(api, lambda line: None, say, stopping=True).supervise(found)
    if options.json:
        put_json(outcome_json(found.run_id, outcome))
    say(f"run {found.run_id} is {describe(outcome)}{f': {outcome.reason}' if outcome.reason else ''}")
    say(f"continue it:  elastic resume {found.run_id} --address {options.address}")
    return 0 if outcome.verdict is Verdict.OVER else outcome.exit_code
