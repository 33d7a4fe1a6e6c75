"""The owners of a cluster, as its keeper sees them, and their pending requests."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from elastic_cluster.json_lines import JsonLines
from elastic_cluster.local import processes
from elastic_cluster.local.node_table import Entry


class Owner:
    """A connection, and the process at its other end: a child forked by that may hold the connection open.

    A process of the cluster itself (its autoscaler) may speak to the keeper too; it is `inside` and owns nothing.
    """

    def __init__(self, connection: socket.socket, keeper_pid: int) -> None:
        connection.settimeout(5.0)
        self.lines = JsonLines(connection)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.inside = self.pid in processes.descendants([keeper_pid], processes.table())
        try:
            self.handle: int | None = os.pidfd_open(self.pid)
        except OSError:  # Gone already: the connection will say so too.
            self.handle = None

    def reply(self, request_id: int, **content: Any) -> None:
        with contextlib.suppress(OSError):  # An owner that is gone is noticed by its connection.
            self.lines.send({"id": request_id, **content})

    def close(self) -> None:
        self.lines.connection.close()
        if self.handle is not None:
            os.close(self.handle)


@dataclass
class Waiting:
    """An owner's request that is answered when none of `entries` is starting any more, or not in time."""

    owner: Owner
    request_id: int
    entries: list[Entry]
    limit_s: float
    deadline: float

    def late(self) -> str:
        if any(entry.control_store_starting for entry in self.entries):
            return f"waited {self.limit_s:g} s for the control store to answer again"
        missing = [entry.name for entry in self.entries if entry.starting]
        return f"waited {self.limit_s:g} s for {', '.join(missing)} to register with Ray"
