"""elastic run: start a run and follow it to its end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from elastic.core.errors import UsageError
from elastic_jobs.commands.common import output_arguments, place_arguments, plan_of, storage_argument
from elastic_jobs.job_file.checks import check_plan, refuse
from elastic_jobs.job_file.load import load_job
from elastic_jobs.run_folder import RunFolder, absolute_url, default_storage
from elastic_jobs.running.backend import Backend, NotStarted
from elastic_jobs.running.launch import launch
from elastic_jobs.running.live import remove_live
from elastic_jobs.running.run_plan import RunPlan

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
    _weights_arguments(parser)
    output_arguments(parser)


def _weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="weights", metavar="DIR|RUN",
        help="begin with the weights of another run, of safetensors or of a DeepSpeed checkpoint",
    )  # fmt: skip
    for name, what in (("missing", "may keep the values they were built with"), ("unexpected", "are left out")):
        parser.add_argument(
            f"--allow-{name}", action="append", default=[], metavar="NAMES",
            help=f"with --from: tensors that match the pattern (head.*) {what}",
        )  # fmt: skip
    parser.add_argument(
        "--allow-pickle", action="store_true", help="with --from: read DeepSpeed's pickles, by a restricted unpickler"
    )


def _weights(options: argparse.Namespace) -> dict[str, Any] | None:
    """The value of the job's key `weights`. Raises UsageError if neither a folder nor a run has the name."""
    given = options.weights
    if given is None:
        if options.allow_missing or options.allow_unexpected or options.allow_pickle:
            raise UsageError("--allow-missing, --allow-unexpected and --allow-pickle go with --from")
        return None
    if "/" in given or Path(given).is_dir():
        source = absolute_url(given, ".")
    else:
        settings = RunFolder(default_storage(options.storage), given).read_job().settings
        source = f"{settings.checkpoint.url.rstrip('/')}/{settings.run_id}"
    return {
        "source": source,
        "allow_missing": options.allow_missing,
        "allow_unexpected": options.allow_unexpected,
        "allow_pickle": options.allow_pickle,
    }


def run(options: argparse.Namespace, backend: Backend) -> int:
    plan = prepare(options)
    folder = RunFolder(plan.job.settings.storage_url, plan.job.settings.run_id)
    # Two launchers may use one name at the same instant: the second is refused here and has nothing to undo.
    folder.claim(plan.job.record())
    try:
        return launch(backend, plan, folder)
    except (UsageError, NotStarted):
        # Nothing was started, so the name becomes free again.
        remove_live(folder)
        folder.remove("job.json")
        raise


def prepare(options: argparse.Namespace) -> RunPlan:
    """The plan, checked before any node is requested. Raises UsageError."""
    file = Path(options.job)
    spec = load_job(file, storage_url=options.storage, weights=_weights(options))
    plan = plan_of(options, spec.job(file, options.run_id))
    refuse(check_plan(plan))
    return plan
