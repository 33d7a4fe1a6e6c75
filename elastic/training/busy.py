"""User code that takes long without calling anything of ours, and is no hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.training.scope import MOVED_EVERY_S, GenerationScope

logger = logging.getLogger(__name__)

# Until when the blocks that the process is in may last.
_declared: dict[object, float] = {}


def declared() -> bool:
    """Whether this process is in a block that says so. From any thread."""
    now = time.monotonic()
    return any(now < until for until in tuple(_declared.values()))


@contextmanager
def reporting(scope: GenerationScope | None, what: str, limit_s: float) -> Iterator[None]:
    """Reports progress every second while the body runs, for `limit_s` at most: after that it is a hang like any other.

    A generation that has ended ends the body at its next call of the engine or the loader, and the report with it.
    None: the process has no generation yet, and the body waits for none; `declared` tells who waits for it.
    """
    left, block = threading.Event(), object()

    def report(scope: GenerationScope) -> None:
        until = time.monotonic() + limit_s
        while not left.wait(MOVED_EVERY_S) and scope.ended is None:
            if time.monotonic() >= until:
                logger.warning(
                    "%s: still %s after %.0f s; from now on this counts as a hang", scope.where(), what, limit_s
                )
                return
            scope.coordinator.moved()

    _declared[block] = time.monotonic() + limit_s
    thread = None
    if scope is not None:
        thread = threading.Thread(target=report, args=(scope,), name="elastic-busy", daemon=True)
        thread.start()
    try:
        yield
    finally:
        del _declared[block]
        left.set()
        if thread is not None:
            thread.join()
