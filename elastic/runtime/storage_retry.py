"""Retries of storage calls during an outage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from elastic.checkpoint.source import CheckpointSource, ReadRange
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import StorageError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def retried(
    ask: Callable[[], _T], backoff_s: float, limit_s: float, wait: Callable[[float], object] = time.sleep
) -> _T:
    """What `ask` returns. A StorageError is retried after a growing pause and raised only after `limit_s`.
    `wait(seconds)` makes the pause."""
    deadline, pause = time.monotonic() + limit_s, backoff_s
    while True:
        try:
            return ask()
        except StorageError as error:
            if time.monotonic() + pause > deadline:
                raise
            logger.warning("%s; next try in %.1f s", error, pause)
            wait(pause)
            pause *= 2


class RetryingSource:
    """Implements `CheckpointSource`. StorageError is raised only after `limit_s`, any other error at once.

    `wait(seconds)` pauses between two tries, and raises when the generation ends meanwhile.
    """

    def __init__(
        self, source: CheckpointSource, backoff_s: float, limit_s: float, wait: Callable[[float], object]
    ) -> None:
        self._source = source
        self._backoff_s = backoff_s
        self._limit_s = limit_s
        self._wait = wait

    @property
    def name(self) -> str:
        return self._source.name

    def manifest(self, checkpoint_id: str) -> Manifest:
        return self._retried(lambda: self._source.manifest(checkpoint_id))

    def read(self, manifest: Manifest, ranges: Sequence[ReadRange]) -> int:
        return self._retried(lambda: self._source.read(manifest, ranges))

    def _retried(self, ask: Callable[[], _T]) -> _T:
        return retried(ask, self._backoff_s, self._limit_s, self._wait)
