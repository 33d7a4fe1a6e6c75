"""Ray's blocking calls to its control store (the GCS), on threads, so that they never block an event loop.

During an outage of the control store some of these calls block until it is back, and the others raise GetTimeoutError
after a minute. Neither is an answer, so `StoreThreads.call` retries; its caller sets the time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ray

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0

_T = TypeVar("_T")


class StoreThreads:
    """`call` any number of times from the event loop; `close` last. With one thread, calls are made in order."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def call(self, function: Callable[[], _T]) -> _T:
        """What `function` returns or raises; called again when the control store has not answered."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, function)
            except ray.exceptions.GetTimeoutError as error:
                logger.debug("the control store has not answered: %s", error)
                await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        """Returns at once; a blocked call ends with the process."""
        self._pool.shutdown(wait=False)
