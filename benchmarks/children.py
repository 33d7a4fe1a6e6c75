"""Processes of a case: started, watched, killed with everything below them, and nothing left at the end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from elastic_cluster.local import processes

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.02
_KILL_LIMIT_S = 20.0
_PR_SET_PDEATHSIG = 1
# Loaded here: a child that is being made must not import anything.
_LIBC = ctypes.CDLL(None)

T = TypeVar("T")


class NotMeasured(Exception):
    """What was to be measured did not happen; the message says what was waited for and where to look."""


def environment(**more: str) -> dict[str, str]:
    """This process's own with one thread per process, no CUDA, and this checkout's packages to import."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, inherited)])),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], T | None], awaited: str, limit_s: float) -> T:
    """The first value of `condition()` that is true. Raises NotMeasured."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotMeasured(f"waited {limit_s:g} s for {awaited}")
        time.sleep(_POLL_S)
    return value


class Children:
    """The processes that one case has started, each with its output in a file of `folder`.

    This process adopts what their deaths leave behind, so that everything below them is found and killed at the end.
    """

    def __init__(self, folder: Path) -> None:
        processes.adopt_orphans()
        self.folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._own = {process.pid for process in processes.table().values() if process.ppid == os.getpid()}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            child = subprocess.Popen(
                list(command), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=dict(env or environment()), start_new_session=True, cwd=ROOT, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._started[name] = child
        return child

    def start_python(self, name: str, module: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        return self.start(name, [sys.executable, "-m", module, *arguments], environment(**env))

    def kill(self, name: str) -> float:
        """SIGKILL `name` and everything below it, as the loss of its node would; returns when it began."""
        root = self._started[name].pid
        at = time.time()

        def members() -> list[processes.Process]:
            found = processes.table()
            pids = {root, *processes.descendants([root], found)} & found.keys()
            return [found[pid] for pid in pids if not found[pid].zombie]

        processes.kill_all(members, lambda: None, _KILL_LIMIT_S)
        self._started.pop(name).wait(_KILL_LIMIT_S)
        return at

    def wait(self, name: str, limit_s: float) -> int:
        """Its exit status. Raises NotMeasured."""
        try:
            return self._started[name].wait(limit_s)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"{name} had not ended after {limit_s:g} s: {self.tail(name)}") from None

    def until(self, condition: Callable[[], T | None], awaited: str, limit_s: float) -> T:
        """`until`, given up at once where a process has ended that was to continue."""

        def look() -> T | None:
            if value := condition():
                return value
            for name, status in self.exited().items():
                raise NotMeasured(f"{name} ended with {status} before {awaited}: {self.tail(name)}")
            return None

        return until(look, awaited, limit_s)

    def kill_gently(self, name: str, limit_s: float) -> None:
        """SIGKILL `name` alone, and give what it had started time to notice and to clean up."""
        self._started[name].kill()
        self._started[name].wait(_KILL_LIMIT_S)
        deadline = time.monotonic() + limit_s
        while self._below() and time.monotonic() < deadline:
            _reap()
            time.sleep(_POLL_S)

    def exited(self) -> dict[str, int]:
        """name -> exit status of those that have ended by themselves."""
        return {name: child.returncode for name, child in self._started.items() if child.poll() is not None}

    def tail(self, name: str, lines: int = 12) -> str:
        text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """Nothing below this process that was not there at the start is left when this returns."""
        processes.kill_all(self._below, _reap, _KILL_LIMIT_S)
        for child in self._started.values():
            child.poll()
        self._started.clear()

    def _below(self) -> list[processes.Process]:
        """Everything below this process, adopted orphans too, but for what was there before."""
        found = processes.table()
        below = processes.descendants([os.getpid()], found) - self._own
        return [found[pid] for pid in below - processes.descendants(self._own, found)]

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _die_with_parent() -> None:
    """In a child before its program begins: also a case that is killed leaves nothing behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap() -> None:
    """Collect every dead child, adopted ones too. A Popen that comes later takes the missing status for 0."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
