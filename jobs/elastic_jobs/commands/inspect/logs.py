"""elastic logs: the drivers' log of a submitted run, with -f until the run ends; else the output of its workers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from elastic.core.errors import UsageError
from elastic.runtime.worker.logs import placed
from elastic.runtime.worker.uploaded_output import worker_of
from elastic_jobs.commands.common import folder_of, storage_argument
from elastic_jobs.exit_codes import exit_code
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.backend import Backend
from elastic_jobs.running.follow import printable, read_summary
from elastic_jobs.submit.attempts import Run
from elastic_jobs.submit.driver_protocol import LogReader
from elastic_jobs.submit.jobs_api import JobsApi
from elastic_jobs.submit.remote import (
    find_run,
    follow,
    how_to_come_back,
    jobs_address_argument,
    looked_at,
    open_api,
    outcome_json,
)
from elastic_jobs.terminal import put, put_json, say

HELP = "print the log of a submitted run, or the output of any other run's workers; exits with the run's exit code"
EXAMPLE = "elastic logs gpt-20260102-030405-ab12 -f --address http://10.0.0.5:8265"

# Seconds of silence at the beginning: the Jobs server takes one before its first answer.
_PATIENCE = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, or the submission id of one of its attempts")
    parser.add_argument(
        "-f", "--follow", action="store_true",
        help="follow until the run ends, across lost connections; a lost driver is replaced",
    )  # fmt: skip
    jobs_address_argument(parser)
    storage_argument(parser)
    parser.add_argument("--worker", type=int, metavar="N", help="only the output of this worker")
    parser.add_argument("--rank", type=int, metavar="N", help="only what workers printed while they had this rank")
    parser.add_argument("--generation", type=int, metavar="N", help="only what they printed in this generation")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, and the log on stderr")


def run(options: argparse.Namespace, backend: Backend) -> int:
    if options.address is None or options.storage is not None:
        return _stored(options)
    chosen = [f"--{name}" for name in ("worker", "rank", "generation") if getattr(options, name) is not None]
    if chosen:
        raise UsageError(f"{chosen[0]} selects from the output of workers, which is in storage: use --storage URL here")
    api = open_api(backend, options.address)
    if options.follow:
        return follow(api, options.run, options.address, options.json)
    found = find_run(api, options.run)
    _print(api, found, say if options.json else put)
    outcome = looked_at(api, found)
    if options.json:
        put_json(outcome_json(found.run_id, outcome))
    if not found.newest.state.ended:
        say(how_to_come_back(found.run_id, options.address))
    return outcome.exit_code


def _stored(options: argparse.Namespace) -> int:
    """The output of a run's workers, from the run's folder in storage."""
    folder = folder_of(options)
    folder.job_record()
    if options.follow:
        raise UsageError(f"-f follows submitted runs (--address); here:  elastic watch {folder.run_id}")
    show = say if options.json else put
    for worker, lines in _outputs(folder):
        if options.worker not in (None, worker):
            continue
        for line in placed(lines):
            if options.rank in (None, line.rank) and options.generation in (None, line.generation):
                show(printable(f"[worker {worker}] {line.text}"))
    status = read_summary(folder).get("status")
    if options.json:
        put_json({"run_id": folder.run_id, "status": status, "exit_code": exit_code(status)})
    return exit_code(status)


def _outputs(folder: RunFolder) -> Iterator[tuple[int, Iterable[str]]]:
    """Each worker's lines, by its number."""
    logs = folder.local_path("logs")
    if logs is None:
        texts = ((worker_of(name), text) for name, text in folder.texts("logs"))
        for worker, pieces in groupby(texts, key=lambda piece: piece[0]):
            if worker is not None:
                yield worker, (line for _, text in pieces for line in text.splitlines(keepends=True))
        return
    for file in sorted(Path(logs).glob("worker-*.log")):
        number = file.stem.partition("-")[2]
        # A link may lead out of the storage.
        if not file.is_symlink() and number.isdecimal():
            with file.open(encoding="utf-8", errors="replace") as lines:
                yield int(number), lines


def _print(api: JobsApi, run: Run, show: Callable[[str], None]) -> None:
    """The newest attempt's log so far."""
    log, silent = LogReader(), 0
    for piece in api.tail(run.newest.submission_id, 0, run.newest.state.ended):
        for line in log.feed(piece):
            show(printable(line))
        silent = 0 if piece else silent + 1
        if silent > (0 if log.chars else _PATIENCE):
            return
