"""Python's cyclic garbage collector where it would walk millions of objects for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Without looks for cycles: each finds more live objects than the one before. Half a million chunks of a manifest
    are read in a third of the time. Another thread that is inside as well may end it early, which costs nothing else.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def hide_objects() -> None:
    """All that there are now, from every later collection. In a process that forks, reference counts aside, its forks
    share their memory."""
    gc.collect()
    gc.freeze()
    # A full collection comes by itself only when a quarter as many objects are new as the last one has found: torch's
    # million would keep the cycles of hundreds of engines.
    gc.collect()
