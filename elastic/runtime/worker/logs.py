"""Output of a worker: to a file next to the run's journal, or to objects there (`uploaded_output`).

In them a line of its own says which generation begins, and the worker's rank in it: what follows is of both.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.core.errors import ElasticError, IntegrityError
from elastic.core.names import check_run_id
from elastic.runtime.worker.uploaded_output import UploadedOutput
from elastic.store.address import local_root
from elastic.store.local import path_below
from elastic.store.open import open_objects

logger = logging.getLogger(__name__)

_BEGINS = re.compile(r"--- generation (\d+), rank (\d+) of \d+ ---\s*")


@dataclass(frozen=True)
class Line:
    """`generation` and `rank` are None for what was printed before the worker's first generation."""

    text: str
    generation: int | None
    rank: int | None


def log_name(run_id: str, worker: int) -> str:
    """Below the storage, where that is a disk."""
    return f"{run_id}/logs/worker-{worker:04d}.log"


def log_file(storage_url: str, run_id: str, worker: int) -> Path | None:
    """None where the storage is not a disk, or a link in it leads elsewhere."""
    root = local_root(storage_url)
    if root is None:
        return None
    try:
        return Path(path_below(root, log_name(check_run_id(run_id), worker)))
    except IntegrityError as error:
        logger.warning("output stays in Ray's log files: %s", error)
        return None


def keep_output(storage_url: str, run_id: str, worker: int) -> Callable[[float], Any] | None:
    """Redirect this process's standard output and error to the run's folder, including output of native code.

    Returns what makes sure, within so many seconds, that all output until then is there; None where output stays in
    Ray's log files.
    """
    if local_root(storage_url) is not None:
        path = log_file(storage_url, run_id, worker)
        return (lambda limit_s: None) if path is not None and redirect(path) else None
    if storage_url.startswith("memory:"):
        # Of this process alone.
        return None
    try:
        output = UploadedOutput(open_objects(storage_url), run_id, worker)
    except (ElasticError, OSError) as error:
        logger.warning("output stays in Ray's log files: %s", error)
        return None
    _redirect(output.descriptor)
    output.start()

    def flush(limit_s: float) -> bool:
        _flush_streams()
        return output.flush(limit_s)

    return flush


def redirect(path: Path) -> bool:
    """False where the file cannot be written to: nothing is redirected then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        logger.warning("output stays in Ray's log files: %s", error)
        return False
    _redirect(file)
    os.close(file)
    return True


def _redirect(descriptor: int) -> None:
    _flush_streams()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _flush_streams() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def begin_generation(generation: int, rank: int, world_size: int) -> None:
    """Write the line that begins a generation to the redirected output."""
    _flush_streams()
    os.write(1, f"--- generation {generation}, rank {rank} of {world_size} ---\n".encode())


def placed(lines: Iterable[str]) -> Iterator[Line]:
    """The lines of a worker's file with generation and rank."""
    generation = rank = None
    for line in lines:
        if found := _BEGINS.fullmatch(line):
            generation, rank = int(found[1]), int(found[2])
        yield Line(line, generation, rank)
