"""elastic story: a run's history as sentences with times and reasons."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from elastic.observe.story import heading, story
from elastic_jobs.commands.common import history_of, run_arguments
from elastic_jobs.running.backend import Backend
from elastic_jobs.terminal import put, put_json

HELP = "print a run's history as sentences with times and reasons"
EXAMPLE = "elastic story gpt-20260102-030405-ab12"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every checkpoint as well")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder, records = history_of(options)
    if not options.json:
        put(heading(folder.run_id, records))
    for line in story(records, everything=options.all):
        put_json(asdict(line)) if options.json else put(str(line))
    return 0
