"""Python's cyclic garbage collector in the controller's process."""

from __future__ import annotations

import gc

# Net allocations of container objects until young ones are looked at (Python: 700), and how many such looks make one
# at the next generation.
_THRESHOLDS = (50_000, 10, 10)


def collect_seldom() -> None:
    """Look for cycles after 50,000 allocations instead of 700.

    The state of a large run is a million long-lived objects without cycles. When a generation of 80,000 workers is
    lost and the next one begins, half a million objects are made in a second, and the usual thresholds have all of them
    looked at several times meanwhile: a third of that second.
    """
    gc.set_threshold(*_THRESHOLDS)
