"""elastic report: a run as one HTML file, while it runs or afterwards."""

from __future__ import annotations

import argparse
from pathlib import Path

from elastic.observe.html.page import page
from elastic_jobs.commands.common import history_of, run_arguments
from elastic_jobs.output_file import write_whole
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put

HELP = "write a run's curves, incidents and causes as one HTML file"
EXAMPLE = "elastic report gpt-20260102-030405-ab12 -o report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: RUN.html)")


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder, records = history_of(options)
    target = Path(options.output or f"{folder.run_id}.html")
    write_whole(target, page(records, folder.read("job.json")))
    put(str(target))
    return 0
