"""A file that a command makes of a run's history."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic.observe.journal import Record
from elastic_jobs.commands.common import history_of, run_arguments
from elastic_jobs.output_file import write_whole
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.terminal import put


def file_arguments(parser: argparse.ArgumentParser, ending: str) -> None:
    run_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help=f"where to write it (default: RUN.{ending})")


def write_file(options: argparse.Namespace, ending: str, content: Callable[[RunFolder, Sequence[Record]], str]) -> int:
    folder, records = history_of(options)
    target = Path(options.output or f"{folder.run_id}.{ending}")
    write_whole(target, content(folder, records))
    put(str(target))
    return 0
