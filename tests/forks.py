"""Processes that begin with torch and DeepSpeed imported: forks of one process, of which each pytest has its own.

Imports are nearly all that the start of such a process costs (3 s of CPU of 3.2).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# torch's store looks up the name of everybody who connects; a resolver that drops a query would cost 5 s.
_SETTINGS = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "RES_OPTIONS": "timeout:1 attempts:2",
}


def context() -> Any:
    """Of `multiprocessing`. Its processes have the environment that this one had at the first call, and `_SETTINGS`."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["forks_imports"])
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with _environment({**_SETTINGS, "PYTHONPATH": path}):
        multiprocessing.forkserver.ensure_running()
    return made


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """For the process that is started inside; the tests that come later must not inherit it."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
