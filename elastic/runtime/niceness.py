"""Raise the CPU priority of controller and agents so that training cannot starve heartbeats."""

from __future__ import annotations

import contextlib
import logging
import os

logger = logging.getLogger(__name__)

_USUAL = 0


def raise_priority() -> bool:
    """Give all threads of this process, and their future children, niceness 0; False where that is refused.

    Ray starts every actor with niceness 15 (`RAY_worker_niceness`), training and monitoring alike. On an overloaded
    node an agent would then be silent for seconds and be taken for frozen. Lowering the number requires root or a
    sufficient `RLIMIT_NICE`.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) <= _USUAL:
        return True
    try:
        for thread in os.listdir("/proc/self/task"):
            # A thread that has ended meanwhile has no priority.
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), _USUAL)
    except OSError as error:
        logger.debug("this process keeps its niceness: %s", error)
        return False
    return True
