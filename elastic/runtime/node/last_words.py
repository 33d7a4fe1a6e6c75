"""What native code has said of why it ends its process: in the file that the process's standard error goes to.

A C++ exception that nobody catches (gloo where ranks meet with tensors of other sizes, an allocator) and a fatal signal
end a process without an exception in Python. What they print is in the worker's output, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re

# So many bytes at the end of the output are read, which have room for stack traces; so many characters are told.
_LOOKED_AT, _MOST = 1 << 18, 300
# On a disk that is slow to answer nobody waits for it.
_LIMIT_S = 0.05
# The first that is found tells most.
_SAID = (
    re.compile(r"\bwhat\(\):\s*(\S.*)"),
    re.compile(r"^(terminate called .*)", re.MULTILINE),
    re.compile(r"^(Fatal Python error: .*)", re.MULTILINE),
)
# Frames, on the same line.
_FRAMES = re.compile(r"\s+/\S+\.so\S*\(.*")


class LastWords:
    """Of one process, which is alive when this is made: what it has printed before is not looked at."""

    def __init__(self, process: int) -> None:
        self._path, self._begin = "", 0
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{process}/fd/2")
            # A pipe, or what was removed, has no size.
            self._path, self._begin = path, os.path.getsize(path)

    async def read(self) -> str:
        """One line, when the process has ended; empty where it has said nothing, or not where it can be read."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            return await asyncio.wait_for(asyncio.to_thread(self.look), _LIMIT_S)
        return ""

    def look(self) -> str:
        text = self._end()
        found = next((found[1] for said in _SAID if (found := said.search(text)) is not None), "")
        return _FRAMES.sub("", found).strip()[:_MOST]

    def _end(self) -> str:
        try:
            with open(self._path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._begin, size - _LOOKED_AT))
                return file.read(_LOOKED_AT).decode(errors="replace")
        except OSError:
            return ""
