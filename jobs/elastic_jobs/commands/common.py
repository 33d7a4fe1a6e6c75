"""Arguments that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from elastic.observe.journal import JournalReader, Record
from elastic_jobs.run_folder import DEFAULT, ENVIRONMENT, RunFolder, default_storage
from elastic_jobs.running.fault_injection import parse_faults
from elastic_jobs.running.run_plan import Job, Output, Place, RunPlan
from elastic_jobs.terminal import say


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above zero, not {text}")
    return value


def storage_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage", metavar="URL", help=f"where runs are kept (any fsspec URL; default ${ENVIRONMENT}, else {DEFAULT})"
    )


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id")
    storage_argument(parser)


def address_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", metavar="A", help="address of the Ray cluster (default: where the run was started)"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return value


def place_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--nodes",
        type=positive,
        metavar="N",
        help="start a local cluster of N nodes (default: one per slot of the job); with --autoscale: nodes available "
        "at once (default: what min_workers need)",
    )
    where.add_argument("--address", metavar="A", help="use the Ray cluster at this address instead")
    parser.add_argument(
        "--autoscale", action="store_true", help="start a local cluster to which Ray's own autoscaler adds nodes"
    )
    parser.add_argument(
        "--max-nodes", type=positive, metavar="N", help="with --autoscale: add N at most (default: one per slot)"
    )
    parser.add_argument(
        "--node-every", type=_seconds, metavar="S", default=30.0,
        help="with --autoscale: one more node is available every S seconds (default 30; 0: only by --chaos add-node)",
    )  # fmt: skip
    parser.add_argument(
        "--chaos", metavar="FAULTS", help='faults by step, local clusters only: "kill-node@step=40,add-node@step=80"'
    )


def output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--summary", metavar="FILE", help="write the summary as one JSON object")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead of a report")


def plan_of(options: argparse.Namespace, job: Job) -> RunPlan:
    """The job where `place_arguments` say. Raises UsageError for faults that are not understood."""
    place = Place(
        options.address,
        options.nodes,
        options.autoscale,
        options.max_nodes,
        options.node_every,
        parse_faults(options.chaos),
    )
    return RunPlan(job, place, output_of(options))


def output_of(options: argparse.Namespace) -> Output:
    return Output(str(Path(options.summary).absolute()) if options.summary else None, options.json)


def folder_of(arguments: argparse.Namespace) -> RunFolder:
    return RunFolder(default_storage(arguments.storage), arguments.run)


def history_of(arguments: argparse.Namespace) -> tuple[RunFolder, Sequence[Record]]:
    """The run's folder and all records of its journal; problems of the journal are printed."""
    folder = folder_of(arguments)
    reader = JournalReader(folder.url, folder.run_id)
    records = reader.records()
    for problem in reader.problems:
        say(problem.sentence)
    return folder, records
