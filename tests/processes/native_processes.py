"""Run one list of cases in several real processes and collect their verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_LIMIT_S = 280.0


def run_processes(module: str, world_size: int, folder: Path) -> list[dict[str, str]]:
    """Per rank: case -> "" or the traceback. A case that no rank reached is missing.

    When one process fails the others are killed: they would wait for it in a collective.
    """
    environment = os.environ | {"PYTHONPATH": f"{_HERE.parent.parent}{os.pathsep}{_HERE}", "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"log-{rank}").open("w") for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(_HERE / "native_main.py"), str(rank), str(folder), module],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    return [_verdicts(folder / f"verdicts-{rank}.json", folder / f"log-{rank}") for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; after the first failure the rest only until they notice."""
    failed = False
    for process in processes:
        try:
            failed = process.wait(timeout=20.0 if failed else _LIMIT_S) != 0 or failed
        except subprocess.TimeoutExpired:
            failed = True


def _verdicts(report: Path, log: Path) -> dict[str, str]:
    if not report.exists():
        return {"start": log.read_text()[-3000:]}
    found: dict[str, str] = json.loads(report.read_text())
    return found
