"""elastic submit: send a job to a Ray cluster and follow it."""

from __future__ import annotations

import argparse

from elastic.core.errors import UsageError
from elastic_jobs.run_folder import ENVIRONMENT as STORAGE
from elastic_jobs.running.backend import Backend
from elastic_jobs.submit import attempts
from elastic_jobs.submit.attempts import Verdict
from elastic_jobs.submit.jobs_api import JobsApi
from elastic_jobs.submit.remote import find_run, follow, how_to_come_back, jobs_address_argument, looked_at, open_api
from elastic_jobs.submit.submission import check_cluster, prepare, send
from elastic_jobs.terminal import put, put_json, say

HELP = "send a job to a Ray cluster, and follow it"
EXAMPLE = "elastic submit job.yaml --address http://10.0.0.5:8265 --storage s3://bucket/runs --env HF_TOKEN"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB.yaml", help="the job file; its folder is sent unless submit.working_dir names another"
    )
    jobs_address_argument(parser)
    parser.add_argument(
        "--run-id", metavar="ID", help="the run's name (default: made from the job's name and the time)"
    )
    parser.add_argument(
        "--storage", metavar="URL",
        help=f"the run's storage, which all nodes must reach (default: the job's storage_url, else ${STORAGE})",
    )  # fmt: skip
    parser.add_argument("--no-follow", action="store_true", help="return as soon as the cluster has the job")
    env_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, and the log on stderr")


def env_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="an environment variable of the job; without =VALUE the value is taken from here. May be repeated",
    )  # fmt: skip


def run(options: argparse.Namespace, backend: Backend) -> int:
    draft = prepare(options.job, options.run_id, options.storage, options.env)
    run_id = draft.job.settings.run_id
    api = open_api(backend, options.address)
    check_cluster(api.cluster(), draft)
    known = next((run for run in attempts.merge(api.records()) if run.run_id == run_id), None)
    if known is None:
        send(api, draft, 1, "new", options.address)
    else:
        check_is_lost(api, known, options.address)
        send(api, draft, known.next_attempt, "continue", options.address)
    return after(api, run_id, options.address, options.no_follow, options.json)


def check_is_lost(api: JobsApi, known: attempts.Run, address: str) -> None:
    """Only a run whose driver is lost gets another one. Raises UsageError for one that is in progress or has ended."""
    outcome = looked_at(api, known)
    if outcome.verdict is Verdict.RUNNING:
        raise UsageError(
            f"run {known.run_id!r} is running as {known.newest.submission_id}; follow it with "
            f"`elastic logs {known.run_id} -f --address {address}`"
        )
    if outcome.verdict is Verdict.OVER:
        raise UsageError(
            f"run {known.run_id!r} has ended there with exit code {outcome.exit_code}; continue it with "
            f"`elastic resume {known.run_id} --address {address}`, or take another --run-id"
        )


def after(api: JobsApi, run_id: str, address: str, no_follow: bool, as_json: bool) -> int:
    """Follows the run, or prints how to."""
    if not no_follow:
        return follow(api, run_id, address, as_json)
    run = find_run(api, run_id)
    if as_json:
        put_json({"run_id": run_id, "submission_id": run.newest.submission_id, "address": address})
    else:
        put(run_id)
    say(how_to_come_back(run_id, address))
    return 0
