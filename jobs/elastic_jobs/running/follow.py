"""Following a run to its end and reporting the result. A follower may leave at any time; the run continues."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from elastic.core.errors import ElasticError, UsageError
from elastic.core.run.phase import USER_CODE_FAILED
from elastic.observe.journal import JournalReader
from elastic.observe.report import report
from elastic.observe.summary import summarize, with_faults, with_result
from elastic.observe.text import outcome
from elastic_jobs.display import Display, open_display
from elastic_jobs.exit_codes import NOT_FINISHED, exit_code
from elastic_jobs.output_file import write_whole
from elastic_jobs.run_folder import RunFolder
from elastic_jobs.running.handle import RunHandle
from elastic_jobs.running.live import forget_live, how_to_come_back
from elastic_jobs.running.run_plan import Output
from elastic_jobs.terminal import confirmed, put, say

# How often the display is refreshed. The wait is in the handle, so the end of the run is noticed at once.
_REFRESH_S = 0.25


class Company(Protocol):
    """Work that accompanies following a run: 1. `start`; 2. `leave` on Ctrl-C, and `start` again if that returns
    False; 3. `end` once the run has ended."""

    def start(self, display: Display) -> None: ...

    def leave(self) -> bool:
        """Whether the follower may leave now."""
        ...

    def end(self) -> Sequence[Mapping[str, Any]]:
        """The faults that were injected, for the summary."""
        ...


class Alone:
    """The company of a follower that the run does not depend on."""

    def start(self, display: Display) -> None:
        pass

    def leave(self) -> bool:
        return True

    def end(self) -> Sequence[Mapping[str, Any]]:
        return ()


def watch(
    handle: RunHandle,
    folder: RunFolder,
    output: Output,
    company: Company | None = None,
    address: str | None = None,
) -> int:
    """Follow the run to its end or to Ctrl-C; returns the exit code. `address`: that of its cluster, if it was
    named."""
    company = company or Alone()
    while True:
        display = open_display(sys.stderr)
        try:
            company.start(display)
            result = follow(handle, display)
            break
        except KeyboardInterrupt:
            with _uninterrupted() as again:
                display.close()
                if company.leave():
                    if again and confirmed(
                        f"Ctrl-C was pressed again: stop run {folder.run_id}, with a last checkpoint?"
                    ):
                        handle.stop("Ctrl-C")
                        say(f"run {folder.run_id} saves a last checkpoint and ends; continue it with `elastic resume`")
                    else:
                        say(f"detached; {how_to_come_back(folder, address)}")
                    return NOT_FINISHED
        finally:
            display.close()
    injected = company.end()
    forget_live(folder)
    return conclude(folder, result, output, injected)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """A second Ctrl-C while the follower leaves must not end the run by accident: it must be confirmed."""
    again: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: again.append(number))
    try:
        yield again
    finally:
        signal.signal(signal.SIGINT, before)


def follow(handle: RunHandle, display: Display) -> Mapping[str, Any]:
    """Show progress until the run ends; returns its result."""
    while True:
        display.update(handle.progress())
        result = handle.result(_REFRESH_S)
        if result is not None:
            display.update({**handle.progress(), "doing": None, "status": result.get("status")})
            return result


def conclude(
    folder: RunFolder, result: Mapping[str, Any], output: Output, faults: Sequence[Mapping[str, Any]] = ()
) -> int:
    """Write the summary file and print the report; returns the exit code of the result's status."""
    summary = with_faults(with_result(read_summary(folder), folder.run_id, result), faults)
    if output.summary_file:
        try:
            write_summary(output.summary_file, summary)
        except UsageError as error:
            # The exit code is that of the run, even if the disk fails.
            say(f"the summary cannot be written: {error}")
    say_why(result, summary)
    show(summary, output.as_json)
    return exit_code(result.get("status"))


def read_summary(folder: RunFolder) -> dict[str, Any]:
    """The summary of the journal, or of no records if the journal cannot be read."""
    try:
        return summarize(JournalReader(folder.url, folder.run_id).records())
    except ElasticError as error:
        say(f"the journal cannot be read: {error}")
        return summarize(())


def show(summary: Mapping[str, Any], as_json: bool) -> None:
    for line in [json.dumps(summary)] if as_json else report(summary):
        put(line)


def say_why(result: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Why a run did not reach its end, with the traceback of user code if that failed."""
    if exit_code(result.get("status")) == 0:
        return
    error = summary.get("error") or {}
    if result.get("status") == USER_CODE_FAILED and error.get("traceback"):
        say(f"worker {error.get('worker')}, step {error.get('step')}:\n{printable(str(error['traceback']))}")
    if result.get("reason"):
        say(f"run {outcome(result.get('status'))}: {printable(str(result['reason']))}")


def printable(text: str) -> str:
    """The text with its line ends, without other characters that a terminal would interpret."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text).rstrip()


def check_summary_file(file: str | None) -> None:
    """Called before the run, because afterwards is too late. Raises UsageError."""
    if file is None:
        return
    folder = Path(file).absolute().parent
    if Path(file).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--summary {file}: cannot write a file there")


def write_summary(file: str, summary: Mapping[str, Any]) -> None:
    write_whole(file, json.dumps(summary, indent=2, allow_nan=False) + "\n")
