"""elastic trace: a run's steps, incidents and checkpoints for Perfetto."""

from __future__ import annotations

import argparse
import json

from elastic.observe.trace import trace
from elastic_jobs.commands.inspect.run_file import file_arguments, write_file
from elastic_jobs.running.backend import Backend

HELP = "write a run's steps, incidents and checkpoints as a trace for Perfetto"
EXAMPLE = "elastic trace gpt-20260102-030405-ab12 -o trace.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    file_arguments(parser, "trace.json")


def run(options: argparse.Namespace, backend: Backend) -> int:
    return write_file(options, "trace.json", lambda _, records: json.dumps(trace(records)))
