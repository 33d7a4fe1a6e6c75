"""User code that takes long without calling anything of ours, and is no hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.training.scope import MOVED_EVERY_S, GenerationScope

logger = logging.getLogger(__name__)


@contextmanager
def reporting(scope: GenerationScope, what: str, limit_s: float) -> Iterator[None]:
    """Reports progress every second while the body runs, for `limit_s` at most: after that it is a hang like any other.

    A generation that has ended ends the body at its next call of the engine or the loader, and the report with it.
    """
    left = threading.Event()

    def report() -> None:
        until = time.monotonic() + limit_s
        while not left.wait(MOVED_EVERY_S) and scope.ended is None:
            if time.monotonic() >= until:
                logger.warning(
                    "%s: still %s after %.0f s; from now on this counts as a hang", scope.where(), what, limit_s
                )
                return
            scope.coordinator.moved()

    thread = threading.Thread(target=report, name="elastic-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
