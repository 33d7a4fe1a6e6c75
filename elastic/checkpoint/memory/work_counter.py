"""Progress of the work on a node's shards: its duration depends on their size; only a lack of progress is an error."""

from __future__ import annotations

import threading

import xxhash

# Work that has processed no byte for this long has failed. Longer than the limit of a read from another node, so that
# the read's own error is reported first.
NO_PROGRESS_LIMIT_S = 30.0
# Takes a fraction of a second.
_CHUNK_BYTES = 64 << 20


class WorkCounter:
    """Thread-safe. `bytes` counts what all threads have processed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        with self._lock:
            return self._bytes

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes


def xxh3_of(data: memoryview, work: WorkCounter) -> str:
    """The xxh3 of all bytes, as hexadecimal digits."""
    xxh3 = xxhash.xxh3_64()
    for at in range(0, len(data), _CHUNK_BYTES):
        with data[at : at + _CHUNK_BYTES] as chunk:
            xxh3.update(chunk)
            work.add(len(chunk))
    return str(xxh3.hexdigest())
