"""Who watches the training is not to wait behind it for a processor."""

from __future__ import annotations

import contextlib
import logging
import os

logger = logging.getLogger(__name__)

_USUAL = 0


def raise_priority() -> bool:
    """Give all threads of this process, and those that they will start, the usual niceness; False where it is refused.

    Ray starts every actor with niceness 15 (`RAY_worker_niceness`), those that train and those that watch alike. On a
    node with more to do than it has processors an agent would then be silent for seconds, and be taken for frozen.
    Lowering the number takes root, or a limit on it that allows that (`RLIMIT_NICE`).
    """
    if os.getpriority(os.PRIO_PROCESS, 0) <= _USUAL:
        return True
    try:
        for thread in os.listdir("/proc/self/task"):
            # One that has ended meanwhile has no priority.
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), _USUAL)
    except OSError as error:
        logger.debug("this process keeps its niceness: %s", error)
        return False
    return True
