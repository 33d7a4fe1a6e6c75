"""Ray's blocking calls to its control store (the GCS), on threads, so that no event loop stands still with them.

While the control store is away some of these calls wait until it is back, and the others raise GetTimeoutError after a
minute. Neither is an answer, so `StoreThreads.call` asks again; whoever awaits it decides for how long.
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
    """`call` from the event loop as often as wanted; `close` last. With one thread, calls are made in order."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def call(self, function: Callable[[], _T]) -> _T:
        """What `function` returns or raises; asked again when Ray says that the control store has not answered."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, function)
            except ray.exceptions.GetTimeoutError as error:
                logger.debug("the control store has not answered: %s", error)
                await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        """Returns at once; a call that blocks ends with the process."""
        self._pool.shutdown(wait=False)
