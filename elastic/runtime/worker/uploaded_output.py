"""Output of a worker in storage that cannot append: objects of a bounded size, the newest written again while it grows.

logs/worker-0003.000001.log     whole lines, about a megabyte
     worker-0003.000002.log     as far as it has come
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import re
import tempfile
import threading

from elastic.core.errors import ElasticError
from elastic.core.names import check_run_id
from elastic.store.objects import Objects

logger = logging.getLogger(__name__)

_OBJECT = re.compile(r"worker-([0-9]{4,9})\.[0-9]{6,9}\.log")
_EVERY_S = 10.0
_MOST_BYTES = 1 << 20
# linux/falloc.h: FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE.
_PUNCH = 0x01 | 0x02


def worker_of(name: str) -> int | None:
    """The worker whose output is in the object of this name; None for other objects."""
    found = _OBJECT.fullmatch(name)
    return int(found[1]) if found else None


class UploadedOutput(threading.Thread):
    """Copies a file that only grows, and frees what has been copied. What a lost process printed last is not in it:
    that of up to `every_s`."""

    def __init__(
        self, objects: Objects, run_id: str, worker: int, every_s: float = _EVERY_S, most_bytes: int = _MOST_BYTES
    ) -> None:
        super().__init__(name="elastic-output", daemon=True)
        self._objects = objects
        self._prefix = f"{check_run_id(run_id)}/logs/worker-{worker:04d}"
        self._every_s, self._most_bytes = every_s, most_bytes
        # Without a name, so that nothing is left behind; children inherit it as their output.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_APPEND)
        self._number, self._begin, self._sent = 1, 0, 0
        self._failing = False
        self._changed = threading.Condition()
        self._wanted = self._done = 0

    @property
    def descriptor(self) -> int:
        """Opened for appending: what is written there is output."""
        return self._file.fileno()

    def flush(self, limit_s: float) -> bool:
        """Copy what there is now; whether that was done within the limit."""
        with self._changed:
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= wanted, limit_s)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._done, self._every_s)
                wanted = self._wanted
            copied = self._copy()
            with self._changed:
                if copied:
                    self._done = wanted
                    self._changed.notify_all()
                elif wanted > self._done:
                    # Tried again after a pause, like all that failed.
                    self._changed.wait(self._every_s)

    def _copy(self) -> bool:
        try:
            while os.fstat(self.descriptor).st_size > self._sent:
                self._copy_one()
        except (ElasticError, OSError) as error:
            if not self._failing:
                # This line is output itself: once in an outage.
                logger.warning("output cannot be written to storage at the moment: %s", error)
            self._failing = True
            return False
        self._failing = False
        return True

    def _copy_one(self) -> None:
        data = os.pread(self.descriptor, self._most_bytes, self._begin)
        full = len(data) == self._most_bytes
        if full:
            # Whole lines, unless one is longer than an object.
            data = data[: data.rfind(b"\n") + 1] or data
        self._objects.put(f"{self._prefix}.{self._number:06d}.log", [data])
        self._sent = self._begin + len(data)
        if full:
            self._number, self._begin = self._number + 1, self._sent
            _free(self.descriptor, self._begin)


def _free(descriptor: int, end: int) -> None:
    """Give the blocks before `end` back. No effect where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate(descriptor, _PUNCH, ctypes.c_long(0), ctypes.c_long(end))
