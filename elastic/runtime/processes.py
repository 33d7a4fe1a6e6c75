"""What /proc tells about processes: whether a signal has stopped one, and the processor time that it has used."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name: the state, and the times of the process and of its ended children.
_STATE, _TIMES, _ALL_TIMES = 0, slice(11, 13), slice(11, 15)


def is_stopped(process: int) -> bool:
    """Whether a signal or a tracer has stopped the process (states T and t of proc(5))."""
    fields = _fields(process)
    return bool(fields) and fields[_STATE] in (b"T", b"t")


def processor_s(process: int, descendants: bool = False) -> float:
    """Seconds, 0 for a process that has ended; `descendants`: with those of all processes that it has started."""
    own = sum(map(int, _fields(process)[_ALL_TIMES if descendants else _TIMES])) / _TICKS
    return own + sum(processor_s(child, True) for child in (_children(process) if descendants else ()))


class Computing:
    """Whether a process computes, for an observer who looks every now and then."""

    def __init__(self, process: int, share: float, every_s: float, now: float) -> None:
        """It does where it has used `share` of one processor in the last `every_s`."""
        self._process = process
        self._share, self._every_s = share, every_s
        self._from_s, self._from = processor_s(process), now
        self._computes = False

    def look(self, now: float) -> bool:
        passed_s = now - self._from
        if passed_s >= self._every_s:
            used_s = processor_s(self._process)
            self._computes = used_s - self._from_s >= self._share * passed_s
            self._from_s, self._from = used_s, now
        return self._computes


def _fields(process: int) -> list[bytes]:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _children(process: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        # It has ended meanwhile, or the kernel has no such file.
        return found
    return found
