"""What Ray executes in place of Python for a worker's process: asks the node's fork server to be it.

    python -I -S fork_launch.py SOCKET [FLAGS] default_worker.py ARGUMENTS

The forked process takes over arguments, environment and descriptors, and this one ends: Ray knows a worker by the pid
and the id with which it registers. Where there is no server, or it refuses, this process becomes the worker as usual.
Nothing but a few modules of the standard library is imported, since every worker waits for this.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys

# Ray gives a process 60 s to register, and one that becomes the worker itself needs some of it.
_LIMIT_S = 30.0
# What is said after the request: the server, the launcher, the server.
READY, AGREED, FORKED = b"r", b"a", b"f"


def request(arguments: list[str]) -> bytes:
    """This process, as the forked one is to be."""
    told = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "leads_group": os.getpgid(0) == os.getpid(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    # Plain ASCII, in which bytes of the environment that are no text survive.
    return json.dumps(told).encode()


def ask(address: str, arguments: list[str]) -> bool:
    """Whether the server has forked the worker. Waits while it imports.

    It forks only after this process has agreed to that: one that has waited for too long is the worker itself.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_LIMIT_S)
            connection.connect(address)
            streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))
            body = request(arguments)
            connection.sendmsg([len(body).to_bytes(4, "big")], [streams])
            connection.sendall(body)
            if connection.recv(1) != READY:
                return False
            connection.sendall(AGREED)
            return connection.recv(1) == FORKED
    except OSError:
        return False


def main(address: str, arguments: list[str]) -> None:
    if not ask(address, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
