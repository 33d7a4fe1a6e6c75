"""Retries of storage calls during an outage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from elastic.checkpoint.source import BytesRead, CheckpointSource, ReadRange
from elastic.core.checkpoint.manifest import Manifest
from elastic.core.errors import StorageError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_PART_BYTES = 4 << 20
_PART_S = 1.0


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
    """Implements `CheckpointSource`. StorageError is raised only after `limit_s` without progress, any other error at
    once.

    State is read in parts, each with its own limit: a large state may take as long as it moves. `moved` gets the bytes
    of each part. `wait(seconds)` pauses between two tries, and raises when the generation ends meanwhile.
    """

    def __init__(
        self,
        source: CheckpointSource,
        backoff_s: float,
        limit_s: float,
        wait: Callable[[float], object],
        moved: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._source = source
        self._backoff_s = backoff_s
        self._limit_s = limit_s
        self._wait = wait
        self._moved = moved

    @property
    def name(self) -> str:
        return self._source.name

    def manifest(self, checkpoint_id: str) -> Manifest:
        return self._retried(lambda: self._source.manifest(checkpoint_id))

    def read(self, manifest: Manifest, ranges: Sequence[ReadRange]) -> BytesRead:
        fetched, size, rest = BytesRead(), _FIRST_PART_BYTES, list(ranges)
        while True:
            part, rest = _split(rest, size)
            begun = time.monotonic()
            fetched += self._retried(partial(self._source.read, manifest, part))
            self._moved(sum(_bytes(read) for read in part))
            # Few parts where storage is fast, and progress every few seconds where it is slow.
            size = size * 4 if time.monotonic() - begun < _PART_S else max(_FIRST_PART_BYTES, size // 4)
            if not rest:
                return fetched

    def _retried(self, ask: Callable[[], _T]) -> _T:
        return retried(ask, self._backoff_s, self._limit_s, self._wait)


def _split(ranges: Sequence[ReadRange], size: int) -> tuple[list[ReadRange], list[ReadRange]]:
    """The first `size` bytes of all ranges, and the others; one element at least."""
    first: list[ReadRange] = []
    for number, read in enumerate(ranges):
        elements = max(1, size // read.target.element_size()) if not first else size // read.target.element_size()
        if elements < read.target.numel():
            begin, rest = read.split(elements)
            return [*first, *begin], [*rest, *ranges[number + 1 :]]
        first.append(read)
        size -= _bytes(read)
    return first, []


def _bytes(read: ReadRange) -> int:
    return read.target.numel() * read.target.element_size()
