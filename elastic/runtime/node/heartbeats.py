"""Heartbeats from a worker to its node's agent: datagrams on an abstract Unix socket.

Datagrams, because sending a heartbeat must never block, neither on a busy agent nor on a frozen one. An abstract name
leaves nothing in the file system; the kernel attests the sender's process and user, so that no other user can forge a
heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_CREDENTIALS = struct.Struct("3i")
_MAX_BYTES = 4096


def open_mailbox() -> tuple[socket.socket, str]:
    """The agent's receiving end and the name that workers send to (without the leading NUL of abstract sockets)."""
    name = f"elastic-agent-{os.getpid()}-{secrets.token_hex(8)}"
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    box.setblocking(False)
    box.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    box.bind(f"\0{name}")
    return box, name


def receive(box: socket.socket) -> list[tuple[int, dict[str, Any]]]:
    """All waiting heartbeats as (sender's process id, message). Messages of other users and malformed ones are
    dropped."""
    messages: list[tuple[int, dict[str, Any]]] = []
    while True:
        try:
            data, ancillary, _, _ = box.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return messages
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid, uid, _ = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])
                with contextlib.suppress(ValueError):
                    if uid == os.getuid():
                        messages.append((pid, json.loads(data)))


class HeartbeatSender:
    """Sends a heartbeat of `worker` to the mailbox every `interval_s`, from its own thread.

    `on_orphaned` is called once when the mailbox has been gone for `lease_s`: the node's agent is dead, and without it
    this worker could not learn that it was removed from the run.
    """

    def __init__(
        self, worker: int, mailbox: str, interval_s: float, lease_s: float, on_orphaned: Callable[[], None]
    ) -> None:
        self._message = json.dumps({"worker": worker}).encode()
        self._address = f"\0{mailbox}"
        self._interval_s = interval_s
        self._tries = max(1, int(lease_s / interval_s))
        self._on_orphaned = on_orphaned
        self._stop = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._beat, name="elastic-heartbeats", daemon=True)
        self._thread.start()

    def _send(self) -> bool:
        """False when no process listens."""
        try:
            self._socket.sendto(self._message, self._address)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _beat(self) -> None:
        missed = 0
        while not self._stop.wait(self._interval_s):
            missed = 0 if self._send() else missed + 1
            if missed >= self._tries:
                self._on_orphaned()
                return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self._interval_s + 1)
        self._socket.close()
