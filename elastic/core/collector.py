"""Python's cyclic garbage collector while many objects without cycles are made at once."""

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
