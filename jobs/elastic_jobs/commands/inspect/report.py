"""elastic report: a run as one HTML file, while it runs or afterwards."""

from __future__ import annotations

import argparse

from elastic.observe.html.page import page
from elastic_jobs.commands.common import above_zero
from elastic_jobs.commands.inspect.run_file import file_arguments, write_file
from elastic_jobs.running.backend import Backend

HELP = "write a run's curves, incidents and causes as one HTML file"
EXAMPLE = "elastic report gpt-20260102-030405-ab12 -o report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    file_arguments(parser, "html")
    parser.add_argument(
        "--watts",
        type=above_zero,
        metavar="N",
        help="the power of one accelerator: estimates energy that no device has told",
    )


def run(options: argparse.Namespace, backend: Backend) -> int:
    return write_file(options, "html", lambda folder, records: page(records, folder.read("job.json"), options.watts))
