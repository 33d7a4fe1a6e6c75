"""Heartbeats from a worker to its node's agent: datagrams on a Unix socket in a folder of the user's own.

Datagrams, because sending a heartbeat must never block, neither on a busy agent nor on a frozen one. The folder keeps
other users out: anybody can send to an abstract name, and a queue that others keep full drops the workers' datagrams.
The kernel attests the sender's process and user, so that no process can forge a heartbeat of another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CREDENTIALS = struct.Struct("3i")
_PREFIX, _SOCKET = "elastic-agent-", "beats"
_LONGEST_FOLDER = 107 - len(f"/{_PREFIX}12345678/{_SOCKET}")
_MAX_BYTES = 4096


def open_mailbox(folder: str | None = None) -> tuple[socket.socket, str]:
    """The agent's receiving end and the path that workers send to, in a new folder (mode 0700) in `folder` (None: the
    temporary folder). Folders that dead agents have left there are removed."""
    where = folder or tempfile.gettempdir()
    _remove_abandoned(where)
    # A socket's path has at most 107 bytes.
    if len(os.fsencode(where)) > _LONGEST_FOLDER:
        where = "/tmp"
    name = os.path.join(tempfile.mkdtemp(prefix=_PREFIX, dir=where), _SOCKET)
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    box.setblocking(False)
    box.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    box.bind(name)
    return box, name


def _remove_abandoned(where: str) -> None:
    """An agent is usually killed. A path that refuses datagrams has no agent behind it."""
    for folder in Path(where).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            if folder.stat().st_uid != os.getuid():
                continue
            try:
                probe.connect(str(folder / _SOCKET))
            except ConnectionRefusedError:
                shutil.rmtree(folder, ignore_errors=True)


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
        self._address = mailbox
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
