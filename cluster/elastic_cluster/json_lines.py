"""JSON lines over a stream socket, both ends."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from elastic_cluster.source import ClusterEnded, ClusterError

_MAX_LINE_BYTES = 16 * 1024 * 1024


class JsonLines:
    """One end. `feed` is for an event loop, `receive` for a caller that waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError when the other end is gone or takes nothing."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def feed(self) -> tuple[list[dict[str, Any]], bool]:
        """What one read brought, and whether the other end is gone. Raises ValueError on anything but JSON lines."""
        try:
            data = self.connection.recv(65536)
        except (ConnectionError, TimeoutError):
            data = b""
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _MAX_LINE_BYTES:
            raise ValueError("a line longer than any command")
        return [json.loads(line) for line in lines], not data

    def receive(self, limit_s: float, awaited: str) -> dict[str, Any]:
        """The next message. ClusterError naming `awaited` after `limit_s`, ClusterEnded when the other end is gone."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(f"waited {limit_s:g} s for {awaited}")
            self.connection.settimeout(left)
            try:
                data = self.connection.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                raise ClusterEnded(f"the cluster ended while waiting for {awaited}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
