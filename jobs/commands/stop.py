"""elastic stop: end a run as planned, with a last checkpoint."""

from __future__ import annotations

import argparse

from jobs.backend import Backend
from jobs.commands.common import address_argument, folder_of, run_arguments
from jobs.live import reach
from jobs.terminal import say

HELP = "end a run as planned, with a last checkpoint"
EXAMPLE = "elastic stop gpt-20260102-030405-ab12"

_WAIT_S = 0.5


def arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    address_argument(parser)
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the run has been told")


def run(options: argparse.Namespace, backend: Backend) -> int:
    """0 when the run has been told, and has ended unless --no-wait."""
    folder = folder_of(options)
    handle = reach(backend, folder, options.address)
    handle.stop("elastic stop")
    if options.no_wait:
        say(f"run {folder.run_id} has been told to stop")
        return 0
    while (result := handle.result(_WAIT_S)) is None:
        pass
    say(f"run {folder.run_id} is {result.get('status')} after step {result.get('step')}")
    return 0
