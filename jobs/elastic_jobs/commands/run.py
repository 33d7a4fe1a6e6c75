"""elastic run: start a run and follow it to its end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from elastic.core.errors import UsageError
from elastic.core.names import check_run_id
from elastic.entrypoint import EntryPoint, load_entry_point, parse_entry_point
from elastic_jobs.backend import Backend, NotStarted, check_nodes, growth
from elastic_jobs.commands.common import output_arguments, place_arguments, storage_argument
from elastic_jobs.fault_injection import parse_faults
from elastic_jobs.follow import check_summary_file
from elastic_jobs.job_file.checks import check_checkpoint_storage, check_deepspeed, check_secrets
from elastic_jobs.job_file.spec import JobSpec, load_job
from elastic_jobs.launch import Launch, launch
from elastic_jobs.live import remove_live
from elastic_jobs.run_folder import RunFolder, default_storage, new_run_id

HELP = "start a run and follow it to its end"
EXAMPLE = """\
elastic run examples/gpt.yaml --nodes 4 --chaos "kill-node@step=40,add-node@step=80" --summary summary.json
  elastic run examples/demo.yaml --autoscale --max-nodes 4"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.yaml", help="the job file")
    place_arguments(parser)
    parser.add_argument(
        "--run-id", metavar="ID", help="the run's name (default: made from the job's name and the time)"
    )
    storage_argument(parser)
    output_arguments(parser)


def run(options: argparse.Namespace, backend: Backend) -> int:
    plan = prepare(options)
    folder = RunFolder(plan.run_settings.storage_url, plan.run_settings.run_id)
    # Of two with one name at one instant the other is refused here, and has nothing to take back.
    folder.claim(job_record(plan))
    try:
        return launch(backend, plan)
    except (UsageError, NotStarted):
        # Nothing was started, so nothing may stand in the way of the next try.
        remove_live(folder)
        folder.remove("job.json")
        raise


def prepare(options: argparse.Namespace) -> Launch:
    """Everything that can be wrong is found here, before any node is asked for. Raises UsageError."""
    spec, job = load_job(options.job), Path(options.job)
    check_summary_file(options.summary)
    check_chaos(options)
    check_deepspeed(spec)
    check_secrets(spec)
    entry = parse_entry_point(spec.entry_point, job.absolute().parent)
    load_entry_point(entry)
    plan = _plan(options, spec, entry, job)
    settings = plan.run_settings
    check_place(plan)
    check_checkpoint_storage(settings)
    folder = RunFolder(settings.storage_url, settings.run_id)
    if folder.read("job.json") is not None:
        raise folder.taken()
    return plan


def check_place(plan: Launch) -> None:
    """Raises UsageError where the nodes that were asked for do not go together with the job."""
    if plan.autoscale:
        if plan.address is not None:
            raise UsageError("--autoscale starts a local cluster; leave out --address")
        growth(plan.run_settings, plan.max_nodes, plan.nodes, plan.node_every_s)
    elif plan.max_nodes is not None:
        raise UsageError("--max-nodes goes with --autoscale; without it say --nodes")
    elif plan.nodes is not None:
        check_nodes(plan.nodes, plan.run_settings)


def check_chaos(options: argparse.Namespace) -> None:
    if parse_faults(options.chaos).faults and options.address is not None:
        raise UsageError("--chaos works on a local cluster only; leave out --address")


def job_record(plan: Launch) -> dict[str, object]:
    """What `elastic resume` needs."""
    return {
        "settings": plan.settings,
        "entry_point": plan.entry_point,
        "config": plan.config,
        "folder": plan.folder,
        "created_at": round(time.time(), 3),
    }


def _plan(options: argparse.Namespace, spec: JobSpec, entry: EntryPoint, job: Path) -> Launch:
    if options.run_id is not None:
        run_id = check_run_id(options.run_id)
    else:
        run_id = new_run_id(spec.name or job.stem, time.time())
    if options.storage is not None:
        spec = spec.model_copy(update={"storage_url": default_storage(options.storage)})
    return Launch(
        settings=spec.settings(run_id, default_storage(None)).to_json(),
        entry_point=str(entry),
        config=spec.config,
        folder=entry.folder,
        nodes=options.nodes,
        address=options.address,
        chaos=options.chaos,
        summary_file=str(Path(options.summary).absolute()) if options.summary else None,
        as_json=options.json,
        autoscale=options.autoscale,
        max_nodes=options.max_nodes,
        node_every_s=options.node_every,
    )
