"""Processes as the kernel tells them, from /proc: who is whose child, who is in which session, and how to end them.

Nothing here goes by a process's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """`start_ticks` tells a process from a later one with the same pid. `state` is the kernel's letter (T: stopped)."""

    pid: int
    ppid: int
    session: int
    state: str
    start_ticks: int

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def read(pid: int) -> Process | None:
    """The process, or None where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0], int(fields[19]))


def table() -> dict[int, Process]:
    """Every process on the machine, zombies included."""
    found = (read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(roots: Iterable[int], processes: Mapping[int, Process]) -> set[int]:
    """The pids below `roots`, without the roots themselves."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        for child in children.get(pending.pop(), []):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty where it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def send(process: Process, number: signal.Signals) -> None:
    """Signal exactly this process: one that took over its pid is left alone."""
    try:
        handle = os.pidfd_open(process.pid)
    except (ProcessLookupError, OSError):
        return
    try:
        now = read(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, so that none can leave the tree."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_all(members: Callable[[], Iterable[Process]], reap: Callable[[], object], limit_s: float) -> set[int]:
    """SIGKILL whatever `members` returns until it returns nothing; returns the pids that were killed.

    All are stopped before the first is killed, so that none sees another die and tells about it, and none forks away.
    `reap` collects dead children of the caller: a zombie counts as a member until its parent has taken notice.
    Raises TimeoutError naming the pids that are still there after `limit_s`.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + limit_s
    while True:
        found = list(members())
        if not found:
            return killed
        living = [process for process in found if not process.zombie]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in living:
                send(process, number)
        killed.update(process.pid for process in living)
        reap()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:g} s for killed processes to be gone: {[p.pid for p in found]}")
        time.sleep(0.005)
