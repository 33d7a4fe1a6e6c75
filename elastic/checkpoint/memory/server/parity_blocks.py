"""The parity of one stripe's shards at one step while it is assembled: the XOR of its ranks' bytes.

An XOR cannot be undone selectively, so every chunk is checked against its own hash before it is added. A rank whose
connection broke continues where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from elastic.core.checkpoint.manifest import Json
from elastic.core.errors import IntegrityError, Where

# Hashed, sent, checked and XORed while it is still in a core's cache.
CHUNK_BYTES = 1 << 20
HASH_BYTES = 8


def chunk_hash(chunk: memoryview) -> bytes:
    return xxhash.xxh3_64(chunk).digest()


def xor_into(target: memoryview, chunk: memoryview) -> None:
    """Releases the GIL."""
    if not len(chunk):  # numpy refuses an empty buffer
        return
    known = np.frombuffer(target, np.uint8)
    np.bitwise_xor(known, np.frombuffer(chunk, np.uint8), out=known)


@dataclass
class Part:
    """One rank's share of a block. `attempt` grows with every connection: only the newest may continue."""

    nbytes: int
    done_bytes: int = 0
    attempt: int = 0
    extra_state: Mapping[str, Json] | None = None
    hash: Any = field(default_factory=xxhash.xxh3_64)
    complete: bool = False

    @property
    def xxh3(self) -> str:
        return str(self.hash.hexdigest())


class Block:
    """Thread-safe. `sizes`: the bytes of each rank's shard."""

    def __init__(self, generation: int, step: int, sizes: Mapping[int, int]) -> None:
        self.step = step
        self.parts = {rank: Part(nbytes) for rank, nbytes in sizes.items()}
        self._generation = generation
        self._lock = threading.Lock()
        # From this offset on the memory still holds bytes of an older snapshot.
        self._filled = 0
        self._cancelled = False

    @property
    def whole(self) -> bool:
        return all(part.complete for part in self.parts.values())

    def enter(self, rank: int, extra_state: Mapping[str, Json] | None) -> int:
        """Begin or continue a rank's share; returns the number of the attempt."""
        with self._lock:
            part = self.parts[rank]
            part.attempt += 1
            part.extra_state = extra_state
            return part.attempt

    def add(self, rank: int, attempt: int, memory: memoryview, chunk: memoryview) -> None:
        """Add the next bytes of the rank's shard. Raises ConnectionError for an attempt that is over."""
        with self._lock:
            part = self._current(rank, attempt)
            begin, end = part.done_bytes, part.done_bytes + len(chunk)
            if end > part.nbytes:
                raise ConnectionError(f"more bytes arrived than rank {rank}'s shard has")
            # No share is past `_filled`, so there is never a gap.
            known = max(0, min(end, self._filled) - begin)
            with memory[begin : begin + known] as target, chunk[:known] as added:
                xor_into(target, added)
            memory[begin + known : end] = chunk[known:]
            part.hash.update(chunk)
            part.done_bytes = end
            self._filled = max(self._filled, end)

    def end(self, rank: int, attempt: int, xxh3: str) -> None:
        """All bytes were added. Raises IntegrityError when they do not match the sender's hash: the block is void."""
        with self._lock:
            part = self._current(rank, attempt)
            if part.done_bytes != part.nbytes or part.xxh3 != xxh3:
                self._cancelled = True
                where = Where(rank=rank, step=self.step, generation=self._generation)
                raise IntegrityError("a shard changed while it was sent: its stripe has no parity of this step", where)
            part.complete = True

    def cancel(self) -> None:
        """Later `add` calls raise ConnectionError."""
        with self._lock:
            self._cancelled = True

    def _current(self, rank: int, attempt: int) -> Part:
        part = self.parts[rank]
        if self._cancelled or part.attempt != attempt:
            raise ConnectionError("this connection was replaced, or the parity of this step was cancelled")
        return part
