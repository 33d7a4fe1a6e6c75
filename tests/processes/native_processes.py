"""Run one list of cases in several real processes and collect their verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forks
import native_main

_LIMIT_S = 280.0


def run_processes(module: str, world_size: int, folder: Path) -> list[dict[str, str]]:
    """Per rank: case -> "" or the traceback. A case that no rank reached is missing.

    When one process fails the others are killed: they would wait for it in a collective.
    """
    processes = [
        forks.context().Process(target=native_main.main, args=(rank, folder, module)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [_verdicts(folder, rank) for rank in range(world_size)]


def _wait(processes: list[Any]) -> None:
    """Until all have ended; after the first failure the rest only until they notice."""
    failed = False
    for process in processes:
        process.join(20.0 if failed else _LIMIT_S)
        failed = process.exitcode != 0 or failed


def _verdicts(folder: Path, rank: int) -> dict[str, str]:
    report = folder / f"verdicts-{rank}.json"
    if not report.exists():
        return {"start": (folder / f"log-{rank}").read_text()[-3000:]}
    found: dict[str, str] = json.loads(report.read_text())
    return found
