"""One segment of anonymous shared memory: created by a server, mapped by workers, freed with its last user."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator

import numpy as np

logger = logging.getLogger(__name__)

# Short enough that a request that arrives in the meantime is answered at once.
_POPULATE_BYTES = 32 << 20
# Stays in a core's cache until it is sent.
_PACKED_BYTES = 256 << 10


def packed(memory: memoryview, begin: int, width: int, rows: int, stride: int) -> Iterator[memoryview]:
    """`rows` rows of `width` bytes, the first at `begin` and each `stride` behind the one before, one after another and
    some at once."""
    at_once = max(1, _PACKED_BYTES // width)
    for row in range(0, rows, at_once):
        count = min(at_once, rows - row)
        there = np.frombuffer(memory, np.uint8, (count - 1) * stride + width, begin + row * stride)
        together = np.lib.stride_tricks.as_strided(there, (count, width), (stride, 1)).copy().reshape(-1)
        # Nobody has the memory while the caller has what was made of it.
        del there
        yield together.data


class Segment:
    """`nbytes` of zeroed memory without a name in any file system. Raises OSError if it cannot be allocated.

    `size` is what it occupies: more than `nbytes` where it is used again for a smaller shard.
    A memfd and not a file in /dev/shm: it ends with the processes that hold it, however they end, and the size of
    /dev/shm, often 64 MiB in containers, does not bound it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.size = max(1, nbytes)  # a mapping cannot be empty
        self.fd = os.memfd_create("elastic-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.size)
            # Occupies only address space until it is touched.
            self._map = map_segment(self.fd, nbytes)
        except OSError:
            os.close(self.fd)
            raise
        self._populated = 0

    def use_again(self, nbytes: int) -> None:
        """For another shard of at most `size` bytes, for the same worker. The old bytes are still there."""
        if nbytes > self.size:
            raise ValueError(f"a segment of {self.size} bytes cannot hold {nbytes}")
        self.nbytes = nbytes

    def map(self) -> memoryview:
        """The memory as writable bytes. Release it before `close`."""
        return memoryview(self._map)[: self.nbytes]

    def reader_fd(self) -> int:
        """A new descriptor that can be read and mapped, but not written."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def rough(self) -> bool:
        """True while the system may still have to allocate some of the pages."""
        return self._populated < self.size

    def populate(self) -> None:
        """Let the system allocate some more of the pages, so that the first copy need not wait for them."""
        begin, self._populated = self._populated, min(self.size, self._populated + _POPULATE_BYTES)
        try:
            os.posix_fallocate(self.fd, begin, self._populated - begin)
        except OSError as error:
            self._populated = self.size
            logger.warning("memory for a snapshot could not be allocated in advance: %s", error)

    @property
    def unpopulated_bytes(self) -> int:
        """Bytes of the segment for which the node has not yet allocated memory."""
        return max(0, self.size - os.fstat(self.fd).st_blocks * 512)

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:
            logger.warning("memory of a snapshot is still mapped and is freed when that ends")
        os.close(self.fd)


def map_segment(fd: int, nbytes: int) -> mmap.mmap:
    """A writable mapping; the descriptor may be closed afterwards."""
    mapped = mmap.mmap(fd, max(1, nbytes))
    # Processes forked by a data loader do not need it, and would keep the memory allocated.
    mapped.madvise(mmap.MADV_DONTFORK)
    return mapped
