"""elastic watch: follow a run that is going on. Ctrl-C leaves it alone."""

from __future__ import annotations

import argparse

from elastic.core.errors import RunNotFound
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic_jobs import launch
from elastic_jobs.backend import Backend
from elastic_jobs.commands.common import address_argument, folder_of, output_arguments, run_arguments
from elastic_jobs.exit_codes import exit_code
from elastic_jobs.follow import check_summary_file, show, write_summary
from elastic_jobs.live import reach_patiently
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.terminal import say

HELP = "follow a run that is going on (Ctrl-C leaves it alone)"
EXAMPLE = "elastic watch gpt-20260102-030405-ab12"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    address_argument(parser)
    output_arguments(parser)


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder = folder_of(options)
    check_summary_file(options.summary)
    try:
        handle = reach_patiently(backend, folder, options.address)
    except RunNotFound as error:
        return _from_journal(options, folder, error)
    return launch.watch(handle, folder, options.summary, options.json)


def _from_journal(options: argparse.Namespace, folder: RunFolder, why: RunNotFound) -> int:
    """Of a run that is over, the journal knows how it ended. Raises RunNotFound when there is none either."""
    summary = summarize(JournalReader(folder.url, folder.run_id).records())
    summary["run_id"] = folder.run_id
    if exit_code(summary["status"]) != 0:
        say(str(why))
    if options.summary:
        write_summary(options.summary, summary)
    show(summary, options.json)
    return exit_code(summary["status"])
