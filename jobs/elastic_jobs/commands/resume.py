"""elastic resume: continue a run from its newest checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.core.checkpoint.recut import change_of_slices
from elastic.core.errors import RunNotFound, TokenRefused, UsageError
from elastic.core.names import check_run_id
from elastic.core.settings import CheckpointSettings, RunSettings
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic_jobs.commands.common import (
    folder_of,
    output_arguments,
    place_arguments,
    plan_of,
    positive,
    run_arguments,
)
from elastic_jobs.commands.submit import after, env_argument
from elastic_jobs.job_file.checks import check_new_end, check_plan, check_seed, is_done, refuse
from elastic_jobs.job_file.load import load_job
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import show
from elastic_jobs.running.launch import launch
from elastic_jobs.running.live import OutOfReach, reach, read_live
from elastic_jobs.running.run_plan import Job
from elastic_jobs.submit import attempts
from elastic_jobs.submit.attempts import Verdict
from elastic_jobs.submit.remote import is_jobs_address, jobs_address, looked_at, open_api
from elastic_jobs.submit.submission import check_cluster, prepare, send
from elastic_jobs.submit.supervision import replace_driver
from elastic_jobs.terminal import say
from elastic_jobs.trust import check_code, trust_argument

HELP = "continue a run from its newest checkpoint"
_NOT_THERE = "; if the run is no longer there, name another --address, or remove live.json from its folder"
EXAMPLE = "elastic resume gpt-20260102-030405-ab12 --nodes 4"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    place_arguments(parser)
    parser.add_argument("--max-steps", type=positive, metavar="N", help="a new end of the run")
    output_arguments(parser)
    trust_argument(parser)
    parser.add_argument(
        "--job", metavar="JOB.yaml",
        help="take code and settings from this job file (default: as the run's folder says, if that code is in the "
        "working directory); with an http address: send its folder (default: what the cluster has)",
    )  # fmt: skip
    jobs = parser.add_argument_group("through the Jobs API (--address http://HOST:8265)")
    jobs.add_argument("--no-follow", action="store_true", help="return as soon as the cluster has the job")
    env_argument(jobs)


def run(options: argparse.Namespace, backend: Backend) -> int:
    options.address = jobs_address(options)
    if is_jobs_address(options.address):
        return _resume_job(options, backend)
    folder = folder_of(options)
    plan = plan_of(options, _with_end(_job(options, folder), options.max_steps))
    summary = _so_far(folder)
    check_new_end(folder.run_id, summary, options.max_steps)
    _check_not_going_on(backend, folder, options.address, options.trust_storage)
    if is_done(summary, options.max_steps):
        say(f"run {folder.run_id} is finished after step {summary.get('steps')}; --max-steps names a later end")
        show(summary, plan.output.as_json)
        return 0
    refuse(check_plan(plan))
    _check_checkpoints(plan.job, summary)
    folder.write("job.json", plan.job.record())
    return launch(backend, plan, folder)


def _so_far(folder: RunFolder) -> dict[str, Any]:
    """The summary of the journal, empty for a run that has not written one yet."""
    try:
        records = JournalReader(folder.url, folder.run_id).records()
    except RunNotFound:
        return {}
    return {**summarize(records), "run_id": folder.run_id}


def _resume_job(options: argparse.Namespace, backend: Backend) -> int:
    """Through the Jobs API: another attempt, in the package that is sent now or in that of the last one."""
    check_run_id(options.run)
    draft = prepare(options.job, options.run, options.storage, options.env) if options.job else None
    if draft is None and options.env:
        raise UsageError("--env goes with --job: without it the environment is that of the last attempt")
    api = open_api(backend, options.address)
    known = next((run for run in attempts.merge(api.records()) if run.run_id == options.run), None)
    if known is not None and looked_at(api, known).verdict is Verdict.RUNNING:
        raise UsageError(
            f"run {options.run!r} is running; follow it with "
            f"`elastic logs {options.run} -f --address {options.address}`"
        )
    if draft is not None:
        check_cluster(api.cluster(), draft)
        number = known.next_attempt if known else 1
        send(api, draft, number, "resume", options.address, options.max_steps)
    elif known is None:
        raise RunNotFound(f"the cluster knows no run {options.run!r}: name its job file with --job, to send it again")
    else:
        replace_driver(api, known, "resume", options.max_steps)
    return after(api, options.run, options.address, options.no_follow, options.json)


def _job(options: argparse.Namespace, folder: RunFolder) -> Job:
    """The job of the job file, else that of the run's folder, once its code is trusted. Raises UsageError."""
    if options.job is None:
        job = _moved(folder.read_job(), folder)
        check_code(job, options.trust_storage or folder.signed)
        return job
    # Of the stored job only the seed and mesh.tp are compared.
    stored = folder.read_job(unsigned=True)
    file = Path(options.job)
    job = load_job(file, storage_url=folder.url).job(file, folder.run_id)
    check_seed(folder.run_id, stored.settings.seed, job.settings.seed)
    before, now = stored.settings.mesh.tp_sizes, job.settings.mesh.tp_sizes
    if before != now:
        say(f"run {folder.run_id}: {change_of_slices(before, now)}")
    return job


def _moved(job: Job, folder: RunFolder) -> Job:
    """The job with the address at which its folder was found: it may have been moved or copied. Raises UsageError for a
    copy of a run that keeps its checkpoints elsewhere."""
    settings = replace(job.settings, run_id=folder.run_id, storage_url=folder.url)
    if folder.url != job.settings.storage_url:
        settings = replace(settings, checkpoint=_moved_checkpoints(job.settings, folder))
    return replace(job, settings=settings)


def _moved_checkpoints(before: RunSettings, folder: RunFolder) -> CheckpointSettings:
    """Checkpoints next to the journal have moved with it. Checkpoints in another storage stay there, and belong to the
    run at its old place if that still exists: two runs would delete each other's checkpoints."""
    if before.checkpoint.url == before.storage_url:
        return replace(before.checkpoint, url=folder.url)
    if before.storage_url and RunFolder(before.storage_url, before.run_id).read("job.json") is not None:
        raise UsageError(
            f"{folder.url}/{folder.run_id} is a copy: run {before.run_id!r} is still in {before.storage_url}, and both "
            f"would delete each other's checkpoints in {before.checkpoint.url}; resume it there, or remove it there "
            "first if this copy is to take its place"
        )
    return before.checkpoint


def _check_checkpoints(job: Job, summary: Mapping[str, Any]) -> None:
    """Raises UsageError if the journal lists checkpoints and storage has none: the run would begin at step 0."""
    from elastic.checkpoint.storage import CheckpointStore

    listed, url = summary.get("checkpoints") or [], job.settings.checkpoint.url
    if listed and not CheckpointStore(url, job.settings.run_id).list():
        raise UsageError(
            f"the journal of run {job.settings.run_id!r} lists {len(listed)} checkpoints, the last of step "
            f"{listed[-1].get('step')}, and none is in {url}/{job.settings.run_id}/checkpoints; put that folder back, "
            "or start a new run"
        )


def _with_end(job: Job, max_steps: int | None) -> Job:
    if max_steps is None:
        return job
    if job.settings.epochs is not None:
        say(f"--max-steps {max_steps} takes the place of the job's `epochs: {job.settings.epochs}`")
    return replace(job, settings=replace(job.settings, max_steps=max_steps, epochs=None))


def _check_not_going_on(backend: Backend, folder: RunFolder, address: str | None, trusted: bool) -> None:
    """Two controllers would fence each other off, and a second start is nearly always a mistake."""
    if address is None and read_live(folder) is None:
        return
    try:
        going_on = reach(backend, folder, address, trusted).result(0.0) is None
    except OutOfReach as error:
        if isinstance(error.__cause__, TokenRefused):
            # A cluster answers there, so the run may still be running in it.
            raise UsageError(f"{error}{'' if address else _NOT_THERE}") from error
        say(f"{error}; it counts as ended; if it is still running there, it will be ended")
        return
    except RunNotFound:
        return
    if going_on:
        raise UsageError(f"run {folder.run_id!r} is running; follow it with `elastic watch {folder.run_id}`")
