"""elastic trace: a run's steps, incidents and checkpoints for Perfetto."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from elastic.observe.trace import trace
from elastic_jobs.commands.common import history_of, run_arguments
from elastic_jobs.output_file import write_whole
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put

HELP = "write a run's steps, incidents and checkpoints as a trace for Perfetto"
EXAMPLE = "elastic trace gpt-20260102-030405-ab12 -o trace.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: RUN.trace.json)")


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder, records = history_of(options)
    target = Path(options.output or f"{folder.run_id}.trace.json")
    write_whole(target, json.dumps(trace(records)))
    put(str(target))
    return 0
