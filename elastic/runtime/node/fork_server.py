"""The agent's side of the process that forks the node's workers (`elastic.runtime.worker.fork_main`).

It imports once per node what a worker imports, at the same time as the node joins; then a worker of the node is a fork
of it and does not import again. It ends with the agent, whose end of its standard input is closed then.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from elastic.core.settings import RunSettings

logger = logging.getLogger(__name__)

# Run by their paths, since a process imports as little as it can: which modules are a worker's, they know.
_SCRIPTS = Path(__file__).resolve().parents[1] / "worker"
# Ray's environments in which workers do not see this process's files, or are started by a command of the user's.
_FOREIGN = frozenset(("container", "image_uri", "py_executable"))
# All workers of a node ask at once.
_BACKLOG = 128


class ForkServer:
    """Started with this object, listening in `folder`. `command` is what Ray is to start workers with in place of
    Python; empty where there is no server: workers are then started as usual.

    `runtime_env` is Ray's of this process, which workers have too; `handed` see `handed_environment.fetch`; workers
    have `niceness`.
    """

    def __init__(
        self,
        folder: str,
        settings: RunSettings,
        runtime_env: Mapping[str, object],
        handed: Mapping[str, str],
        niceness: int,
    ) -> None:
        self.command = ""
        # Its end of the server's standard input is closed when this process ends, however it ends.
        self.process: subprocess.Popen[bytes] | None = None
        if not _FOREIGN.isdisjoint(runtime_env):
            return
        address = os.path.join(folder, "forks")
        try:
            self._start(address, told(settings, handed, niceness))
        except OSError as error:
            logger.warning("workers of this node import by themselves: %s", error)
        else:
            self.command = shlex.join([sys.executable, "-I", "-S", str(_SCRIPTS / "fork_launch.py"), address])

    def _start(self, address: str, message: Mapping[str, object]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(_BACKLOG)
            server = self.process = subprocess.Popen(
                [sys.executable, str(_SCRIPTS / "fork_main.py"), str(listener.fileno())],
                stdin=subprocess.PIPE, env=started_with(), pass_fds=[listener.fileno()],
            )  # fmt: skip
        # One that finds that it cannot be forked ends before the agent does.
        threading.Thread(target=server.wait, name="elastic-fork-server", daemon=True).start()
        assert server.stdin is not None
        server.stdin.write(json.dumps(message).encode() + b"\n")
        server.stdin.flush()


def told(settings: RunSettings, handed: Mapping[str, str], niceness: int) -> dict[str, object]:
    """What the server imports, and which variables a worker has then besides those it was started with."""
    cpus = settings.resources_per_worker.get("CPU", 0)
    environment = {"OMP_NUM_THREADS": str(max(int(cpus), 1))}
    if not settings.resources_per_worker.get("GPU", 0):
        environment["DS_ACCELERATOR"] = "cpu"
    return {
        "environment": environment,
        "handed": dict(handed),
        "search_path": sys.path,
        "niceness": niceness,
        "engine": settings.engine,
        "snapshots": settings.snapshots.enabled,
    }


def started_with() -> dict[str, str]:
    """The environment that this process was started with. Ray has changed it since, for this actor alone."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
