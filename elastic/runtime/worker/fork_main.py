"""The process of a node that has imported what a worker imports, and forks the node's workers.

Started by the node's agent by this file's path (`elastic.runtime.node.fork_server`), asked by `fork_launch`. A forked
process runs Ray's own script of a worker process, as if it had been started by Ray itself, and connects to Ray by
itself: nothing of Ray's is running here. What a fork would inherit in a bad state is checked before the first one:
threads, and a device that is in use. The server then ends, and workers import by themselves.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# A launcher has nothing else to do than to send its request.
_REQUEST_LIMIT_S = 5.0
# Of the shell that Ray starts its workers with, and of Python's own start.
_NOT_COMPARED = frozenset(("_", "SHLVL", "OLDPWD", "LC_CTYPE"))
# torch then counts devices by the driver's management library, which initialises nothing.
_COUNT_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class Request:
    """A process as Ray has started it, see `fork_launch.request`, and its descriptors 0, 1 and 2."""

    arguments: list[str]
    environment: Mapping[str, str]
    folder: str
    niceness: int
    leads_group: bool
    blocked: list[int]
    streams: tuple[int, ...]


def receive(connection: socket.socket) -> Request:
    """Raises OSError or ValueError for what is no request."""
    connection.settimeout(_REQUEST_LIMIT_S)
    room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    head, ancillary, _, _ = connection.recvmsg(4, room, socket.MSG_CMSG_CLOEXEC)
    streams = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            streams.frombytes(data[: len(data) - len(data) % streams.itemsize])
    try:
        body, wanted = b"", int.from_bytes(head, "big")
        while len(body) < wanted:
            part = connection.recv(wanted - len(body))
            if not part:
                raise ConnectionError("the launcher has gone")
            body += part
        return Request(**json.loads(body), streams=tuple(streams))
    except (OSError, ValueError, TypeError):
        for descriptor in streams:
            os.close(descriptor)
        raise


def obstacle(request: Request, environment: Mapping[str, str], folder: str) -> str | None:
    """Why a process of this environment and working directory cannot become that one: libraries have read theirs."""
    if len(request.streams) != 3:
        return f"{len(request.streams)} descriptors came with the request"
    if request.arguments[0].startswith("-"):
        return f"Python is to be started with {request.arguments[0]}"
    names = (environment.keys() | request.environment.keys()) - _NOT_COMPARED
    if differs := sorted(name for name in names if environment.get(name) != request.environment.get(name)):
        return f"its environment differs in {', '.join(differs)}"
    return None if request.folder == folder else f"its working directory is {request.folder}, not {folder}"


def become(request: Request, search_path: list[str]) -> None:
    """Make this forked process the one that Ray has started, and run its script. Returns when the script does."""
    for number, descriptor in enumerate(request.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request.leads_group:
        os.setpgid(0, 0)
    if request.niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    if "numpy" in sys.modules:
        # Python's own generator is seeded anew in a forked process; numpy's would be the same in all workers.
        sys.modules["numpy"].random.seed()
    if touched() is not None:
        os.execv(sys.executable, [sys.executable, *request.arguments])
    sys.argv[:] = request.arguments
    sys.path[:] = [os.path.dirname(os.path.realpath(request.arguments[0])), *search_path]
    runpy.run_path(request.arguments[0], run_name="__main__")


def touched() -> str | None:
    """The kind of device that was in use before this process was forked."""
    import torch

    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind)
        if module.is_initialized() or module._is_in_bad_fork():
            return kind
    return None


def say(text: str) -> None:
    """To the agent's log. A handler of Python's logging would be the workers', too."""
    os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} fork server {os.getpid()}: {text}\n".encode())


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def unfit(threads_before: int) -> str | None:
    """Why this process should not be forked, tried with a process that ends at once."""
    if (count := threads()) > threads_before:
        return f"{count - threads_before} threads were started by what was imported"
    if (child := os.fork()) == 0:
        os._exit(0 if touched() is None else 1)
    return "a device was initialised by what was imported" if os.waitpid(child, 0)[1] else None


def requests(listener: socket.socket, owner: int) -> Iterator[socket.socket]:
    """Connections of launchers until the agent's end of `owner` is closed."""
    while True:
        ready, _, _ = select.select([listener.fileno(), owner], [], [])
        if owner in ready:
            return
        with contextlib.suppress(OSError):
            yield listener.accept()[0]


def serve(listener: socket.socket, environment: Mapping[str, str], search_path: list[str]) -> Request | None:
    """Fork a process for every request; None when the agent has gone. In the forked process its request."""
    # Late: where this package is, the agent has told.
    from elastic.runtime.worker.fork_launch import AGREED, FORKED, READY

    folder = os.getcwd()
    # Nobody waits for the workers here: their agent watches them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for connection in requests(listener, sys.stdin.fileno()):
        with connection:
            try:
                request = receive(connection)
            except (OSError, ValueError, TypeError) as error:
                say(f"a request to fork a worker was not understood: {error}")
                continue
            try:
                if (why := obstacle(request, environment, folder)) is not None:
                    say(f"a worker imports by itself: {why}")
                else:
                    connection.sendall(READY)
                    # A launcher that has waited for too long has gone, and is the worker itself.
                    if connection.recv(1) == AGREED and os.fork() == 0:
                        return request
                    connection.sendall(FORKED)
            except OSError as error:
                say(f"a worker imports by itself: {error}")
            for descriptor in request.streams:
                os.close(descriptor)
    return None


def prepare(told: Mapping[str, Any]) -> str | None:
    """Import what a worker of this run imports; why the process cannot be forked then."""
    for name, value in told["environment"].items():
        os.environ.setdefault(name, value)
    os.environ.update(told["handed"])
    os.environ[_COUNT_WITHOUT_CUDA] = "1"
    if told["niceness"] > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, told["niceness"])
    sys.path.extend(path for path in told["search_path"] if path not in sys.path)
    # Its linear algebra starts threads, and ends them before a fork.
    importlib.import_module("numpy")
    before = threads()
    importlib.import_module("elastic.runtime.worker.preload").preload(told["engine"], told["snapshots"])
    importlib.import_module("elastic.core.collector").hide_objects()
    return unfit(before)


def main() -> None:
    """`argv[1]` is the descriptor of the listening socket; the agent's pipe is standard input."""
    environment = dict(os.environ)
    # This file's own folder.
    search_path = sys.path[1:]
    sys.path[:] = search_path
    told = json.loads(sys.stdin.buffer.readline())
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        why = prepare(told)
        if why is not None:
            say(f"the workers of this node import by themselves: {why}")
            return
        request = serve(listener, environment, search_path)
    if request is not None:
        become(request, search_path)


if __name__ == "__main__":
    main()
