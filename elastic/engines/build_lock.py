"""A lock for the compilation of operators that ends with its owner.

torch guards a build folder by a file that the builder creates and removes (`torch.utils.file_baton`). A process that is
killed while it compiles leaves the file behind, and every later process of the node waits for it without limit. The
kernel releases this lock (flock) when its owner ends, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_EVERY_S = 30.0


def install() -> None:
    """Use this lock for all operators that this process compiles. Idempotent."""
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = BuildLock  # type: ignore[attr-defined,assignment]


class BuildLock:
    """In place of torch's FileBaton, with its interface; processes that use torch's own are excluded as well.

    1. `try_acquire` waits until nobody builds in the folder, and returns True: the caller then runs the build, which
       ends at once where another process has made it already
    2. `release`
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = _POLL_S) -> None:
        """`lock_file_path` is torch's: "lock" in the build folder."""
        self._theirs = Path(lock_file_path)
        self._own = self._theirs.with_name("lock.flock")
        self._wait_s = wait_seconds
        self._fd: int | None = None

    def try_acquire(self) -> bool:
        """Always True. Logs every 30 s which folder it waits for."""
        began = said = time.monotonic()
        while not self.taken():
            # Not all at the same moment.
            time.sleep(self._wait_s * random.uniform(0.5, 1.5))
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                logger.warning("for %.0f s another process has been compiling in %s", said - began, self._theirs.parent)
        return True

    def taken(self) -> bool:
        """Take the lock, unless another process has it or a compiler runs in the folder, be its owner alive or not."""
        fd = os.open(self._own, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        if _someone_works_in(self._theirs.parent):
            os.close(fd)
            return False
        # Processes with torch's own lock wait while this file exists.
        self._theirs.touch()
        self._fd = fd
        return True

    def wait(self) -> None:
        """Never called, since `try_acquire` never returns False."""
        raise AssertionError("a build lock is acquired, not waited for")

    def release(self) -> None:
        if self._fd is not None:
            self._theirs.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def _someone_works_in(folder: Path) -> bool:
    """Does a process of this machine have `folder` as its working directory, as ninja and compilers have?"""
    wanted = str(folder.resolve())
    for process in os.listdir("/proc"):
        if process.isdigit() and int(process) != os.getpid():
            try:
                if os.readlink(f"/proc/{process}/cwd") == wanted:
                    return True
            except OSError:
                # It has ended, or belongs to another user.
                continue
    return False
