"""Output of a worker: to a file beside the run's journal if that is on a disk; otherwise to Ray's log files."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from elastic.core.errors import IntegrityError
from elastic.core.names import check_run_id
from elastic.store.address import local_root
from elastic.store.local import path_below

logger = logging.getLogger(__name__)


def log_file(storage_url: str, run_id: str, worker: int) -> Path | None:
    """None where the storage is not a disk (object stores cannot append), or a link in it leads elsewhere."""
    root = local_root(storage_url)
    if root is None:
        return None
    try:
        return Path(path_below(root, f"{check_run_id(run_id)}/logs/worker-{worker:04d}.log"))
    except IntegrityError as error:
        logger.warning("output stays in Ray's log files: %s", error)
        return None


def redirect(path: Path | None) -> None:
    """Redirect this process's standard output and error to the file, including output of native code."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        logger.warning("output stays in Ray's log files: %s", error)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
