"""elastic watch: follow a running run. Ctrl-C detaches."""

from __future__ import annotations

import argparse

from elastic.core.errors import RunNotFound
from elastic.observe.journal import JournalReader
from elastic.observe.summary import summarize
from elastic_jobs.commands.common import address_argument, folder_of, output_arguments, output_of, run_arguments
from elastic_jobs.exit_codes import exit_code
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import check_summary_file, show, watch, write_summary
from elastic_jobs.running.live import reach_patiently
from elastic_jobs.running.run_plan import Output
from elastic_jobs.terminal import say
from elastic_jobs.trust import trust_argument

HELP = "follow a running run (Ctrl-C detaches)"
EXAMPLE = "elastic watch gpt-20260102-030405-ab12"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    address_argument(parser)
    trust_argument(parser)
    output_arguments(parser)


def run(options: argparse.Namespace, backend: Backend) -> int:
    folder, output = folder_of(options), output_of(options)
    check_summary_file(output.summary_file)
    try:
        handle = reach_patiently(backend, folder, options.address, options.trust_storage)
    except RunNotFound as error:
        return _from_journal(output, folder, error)
    return watch(handle, folder, output, address=options.address)


def _from_journal(output: Output, folder: RunFolder, why: RunNotFound) -> int:
    """Show the end of a run that has ended, from its journal. Raises RunNotFound if there is no journal either."""
    summary = summarize(JournalReader(folder.url, folder.run_id).records())
    summary["run_id"] = folder.run_id
    if exit_code(summary["status"]) != 0:
        say(str(why))
    if output.summary_file:
        write_summary(output.summary_file, summary)
    show(summary, output.as_json)
    return exit_code(summary["status"])
