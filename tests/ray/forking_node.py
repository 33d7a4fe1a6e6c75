"""First process of a node of the tests' cluster: as `elastic_cluster.local.node_init`, with a process beside the raylet
that has imported torch and DeepSpeed. Ray's workers on this node are forks of it.

A worker that imports them by itself costs 5 s of CPU; who starts how is not what the tests of runs show. Those of
clusters, tokens and the product's own fork server have clusters without it.

    forking_node.py RAYLET ARGUMENT...      in place of node_init.py, see `starter.NODE_INIT`
    forking_node.py --serve SOCKET PID      the process that forks, until the raylet of that pid ends
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER = _ROOT / "elastic" / "runtime" / "worker" / "fork_launch.py"
_NODE_INIT = _ROOT / "cluster" / "elastic_cluster" / "local" / "node_init.py"
_WORKERS = "--python_worker_command="
# Read by libraries while they are imported: a worker whose own differ is started as usual.
_READ_AT_IMPORT = ("CUDA", "DS_", "LD_", "MKL", "NCCL", "OMP", "PYTHON", "TORCH")


def start_node(arguments: list[str]) -> int:
    """Becomes the node's init, with the raylet of that command and the process that forks as its children."""
    (place,) = (word.partition("=")[2] for word in arguments if word.startswith("--raylet_socket_name="))
    address = f"{place}.forks"
    for at, word in enumerate(arguments):
        if word.startswith(_WORKERS):
            python, _, rest = word.removeprefix(_WORKERS).partition(" ")
            arguments[at] = f"{_WORKERS}{python} -I -S {_LAUNCHER} {address} {rest}"
    listener = socket.socket(socket.AF_UNIX)
    # Of an earlier life of a node of this name.
    Path(address).unlink(missing_ok=True)
    listener.bind(address)
    listener.listen(128)
    sys.argv[1:] = arguments
    main = runpy.run_path(str(_NODE_INIT))["main"]
    code: int = main(lambda raylet: _start_server(listener, raylet))
    return code


def _start_server(listener: socket.socket, raylet: int) -> None:
    with listener:
        if os.fork() == 0:
            os.set_inheritable(listener.fileno(), True)
            # Ray's own allocator is for the raylet, not for workers.
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            words = [sys.executable, __file__, "--serve", str(listener.fileno()), str(raylet)]
            os.execve(sys.executable, words, environment)


def serve(listener: socket.socket, raylet: int) -> Any:
    """In a forked process its request; None when the raylet has ended."""
    from elastic.runtime.worker import fork_main
    from elastic.runtime.worker.fork_launch import AGREED, FORKED, READY

    environment = dict(os.environ)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, raylet], [], [])
        if raylet in ready:
            return None
        connection = listener.accept()[0]
        with connection:
            try:
                request = fork_main.receive(connection)
                names = {n for n in {*environment, *request.environment} if n.startswith(_READ_AT_IMPORT)}
                if all(environment.get(name) == request.environment.get(name) for name in names):
                    connection.sendall(READY)
                    if connection.recv(1) == AGREED and os.fork() == 0:
                        return request
                    connection.sendall(FORKED)
                for descriptor in request.streams:
                    os.close(descriptor)
            except (OSError, ValueError, TypeError) as error:
                fork_main.say(f"no fork: {error}")


def main() -> int:
    if sys.argv[1] == "--worker":
        return _work(sys.argv[2:])
    if sys.argv[1] != "--serve":
        return start_node(sys.argv[1:])
    listener, raylet = socket.socket(fileno=int(sys.argv[2])), os.pidfd_open(int(sys.argv[3]))
    own = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    # For `forks_imports`, in place of this file's folder.
    sys.path[0] = str(_ROOT / "tests")
    importlib.import_module("forks_imports")
    del sys.path[0]
    os.environ.clear()
    os.environ.update(own)
    gc.collect()
    gc.freeze()
    request = serve(listener, raylet)
    if request is not None:
        from elastic.runtime.worker.fork_main import become

        listener.close()
        os.close(raylet)
        # Ray's library reads the environment when it is loaded: after that has become the worker's.
        become(replace(request, arguments=[__file__, "--worker", *request.arguments]), list(sys.path))
    return 0


def _work(words: list[str]) -> int:
    """Ray's script that sets up a worker's environment, in this process; it would replace it by one of the worker's
    own script."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    another = RuntimeEnvContext.exec_worker

    def run(self: Any, script: list[str], language: Any) -> None:
        others = self.command_prefix or self.override_worker_entrypoint or self.py_executable != sys.executable
        if others or any(name.startswith(_READ_AT_IMPORT) for name in self.env_vars):
            another(self, script, language)
        update_envs(self.env_vars)
        _run(script)

    RuntimeEnvContext.exec_worker = run
    _run(words)
    return 0


def _run(words: list[str]) -> None:
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
