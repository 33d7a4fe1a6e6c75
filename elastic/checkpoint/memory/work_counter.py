"""How far the work on a node's shards has come: how long gigabytes may take nobody can say, but that nothing moves."""

from __future__ import annotations

import threading

import xxhash

# Without a byte of anybody's work having been done for so long, what is waited for counts as standing still. More than
# a read from another node waits for its next byte, so that its own error is heard first.
STILL_LIMIT_S = 30.0
# A part of a second's work.
_CHUNK_BYTES = 64 << 20


class Pace:
    """Thread-safe. `bytes` grows with every piece of work that is done, whosever it is."""

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


def hash_of(data: memoryview, pace: Pace) -> str:
    """The xxh3 of all bytes, as hexadecimal digits."""
    xxh3 = xxhash.xxh3_64()
    for at in range(0, len(data), _CHUNK_BYTES):
        with data[at : at + _CHUNK_BYTES] as chunk:
            xxh3.update(chunk)
            pace.add(len(chunk))
    return str(xxh3.hexdigest())
