"""Following a run to its end, and saying what it came to. Leaves the run alone: whoever follows may leave."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.core.errors import ElasticError, UsageError
from elastic.core.run.phase import USER_CODE_FAILED
from elastic.observe.journal import JournalReader
from elastic.observe.report import report
from elastic.observe.summary import summarize, with_faults
from elastic.observe.text import finite
from elastic_jobs.display import Display
from elastic_jobs.exit_codes import exit_code
from elastic_jobs.handle import RunHandle
from elastic_jobs.terminal import put, put_json, say

# How often the display asks. The wait is the handle's own, so the end of the run is seen at once.
_REFRESH_S = 0.25


def follow(handle: RunHandle, display: Display) -> Mapping[str, Any]:
    """Shows progress until the run ends; returns its result."""
    while True:
        display.update(handle.progress())
        result = handle.result(_REFRESH_S)
        if result is not None:
            display.update({**handle.progress(), "doing": None, "status": result.get("status")})
            return result


def conclude(
    run_id: str,
    storage_url: str,
    result: Mapping[str, Any],
    summary_file: str | None,
    as_json: bool,
    faults: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Writes the summary file and prints the report; returns the exit code of the result's status."""
    summary = with_faults(read_summary(run_id, storage_url, result), faults)
    if summary_file:
        try:
            write_summary(summary_file, summary)
        except OSError as error:
            # The run has ended as it has, whatever became of the disk meanwhile.
            say(f"the summary cannot be written: {error}")
    say_why(result, summary)
    show(summary, as_json)
    return exit_code(result.get("status"))


def read_summary(run_id: str, storage_url: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The journal's summary; where the journal ends early (storage failing), what the controller said is truer."""
    try:
        records = JournalReader(storage_url, run_id).records()
    except ElasticError as error:
        say(f"the journal cannot be read: {error}")
        records = []
    summary = summarize(records)
    known = {"status": result.get("status"), "reason": result.get("reason") or None, "steps": result.get("step")}
    known["final_loss"] = finite(result.get("loss"))
    return {**summary, "run_id": run_id, **{key: value for key, value in known.items() if value is not None}}


def show(summary: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        put_json(summary)
        return
    for line in report(summary):
        put(line)


def say_why(result: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Why a run did not reach its end, with user code's own traceback where that was the reason."""
    if exit_code(result.get("status")) == 0:
        return
    error = summary.get("error") or {}
    if result.get("status") == USER_CODE_FAILED and error.get("traceback"):
        say(f"worker {error.get('worker')}, step {error.get('step')}:\n{printable(str(error['traceback']))}")
    if result.get("reason"):
        say(f"run is {result.get('status')}: {printable(str(result['reason']))}")


def printable(text: str) -> str:
    """Keeps the line ends of a traceback and nothing else that a terminal would act on."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text).rstrip()


def check_summary_file(file: str | None) -> None:
    """Before the run: it would be a pity to find out afterwards."""
    if file is None:
        return
    folder = Path(file).absolute().parent
    if Path(file).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--summary {file}: cannot write a file there")


def write_summary(file: str, summary: Mapping[str, Any]) -> None:
    """Whole or not at all, so that nobody reads half a summary."""
    path = Path(file)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
