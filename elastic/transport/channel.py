"""Messages between workers, the server of a node and the servers of other nodes.

A message is a four-byte length and JSON of that length; raw bytes may follow where the message says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from elastic.core.errors import CollectiveFailed, ElasticError, Fenced, IntegrityError, StorageError, UsageError

Message = dict[str, Any]

# The other side counts as gone when no byte has arrived for so long.
IO_LIMIT_S = 10.0

_LENGTH = struct.Struct("!I")
# The template of a stage-3 shard of 500 parameters takes some 100 kB.
_MAX_MESSAGE_BYTES = 256 << 20
# Below the kernel's bound on the parts of one call (IOV_MAX).
MAX_PARTS = 512
# The receiver of a shard is woken once for so many bytes and not for every packet: on a machine that trains, wake-ups
# cost as much processor time as the copying. A small part of any socket's buffer.
_WAKE_BYTES = 256 << 10

_ERRORS: dict[str, type[ElasticError]] = {
    "UsageError": UsageError, "IntegrityError": IntegrityError, "StorageError": StorageError, "Fenced": Fenced,
    "CollectiveFailed": CollectiveFailed,
}  # fmt: skip


class Channel:
    """One connection. Calls raise OSError when it broke or a limit ran out; it is unusable after that.

    One thread may send while another receives; nothing else is shared between threads except `shut`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent_bytes = 0
        # Counts what `exactly`, `recv_into` and `receive` have taken; other threads may look.
        self.received_bytes = 0
        # Not settimeout(): it makes the descriptor non-blocking, which sendfile and MSG_WAITALL do not support.
        sock.settimeout(None)
        self.limit(IO_LIMIT_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keepalive(sock)

    def limit(self, seconds: float) -> None:
        """The longest wait of one send or receive."""
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6) or (0 if seconds >= 1 else 1000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def fileno(self) -> int:
        return self._sock.fileno()

    def idle(self, seconds: float) -> bool:
        """Wait for the next message; True when none came."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(seconds * 1000)

    def send(self, message: Message, fd: int | None = None) -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(text)) + text
        with _translated():
            if fd is None:
                self._sock.sendall(data)
            else:
                sent = socket.send_fds(self._sock, [data], [fd])
                self._sock.sendall(data[sent:])

    def receive(self) -> tuple[Message, int | None]:
        """The next message, and the descriptor that came with it."""
        with _translated():
            head, fds, _, _ = socket.recv_fds(self._sock, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
            try:
                if not head:
                    raise ConnectionError("the connection was closed")
                head += self.exactly(_LENGTH.size - len(head))
                (length,) = _LENGTH.unpack(head)
                if length > _MAX_MESSAGE_BYTES:
                    raise ConnectionError(
                        f"a message of {length} bytes was announced, more than any message of this version has"
                    )
                message = _parse(self.exactly(length))
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
        return message, fds[0] if fds else None

    def ask(self, message: Message) -> Message:
        """Send and receive. Raises the error that the other side answered with."""
        self.send(message)
        return checked(self.receive()[0])

    def exactly(self, count: int, until: float | None = None) -> bytes:
        """So many bytes. `until` (monotonic seconds) is a deadline for all of them, however they are cut."""
        data = bytearray(count)
        self._fill([memoryview(data)] if count else [], until)
        return bytes(data)

    def recv_into(self, views: Sequence[memoryview]) -> None:
        """Fill all views, one after the other."""
        pending = [view for view in views if len(view)]
        # The last bytes are received separately: fewer bytes than the wake-up mark would never wake the receiver.
        patient = sum(map(len, pending)) - _WAKE_BYTES
        if patient >= _WAKE_BYTES and self._sock.family != socket.AF_UNIX:
            first, pending = split_views(pending, patient)
            self._wake_after(_WAKE_BYTES)
            self._fill(first)
            self._wake_after(1)
        self._fill(pending)

    def _fill(self, pending: Sequence[memoryview], until: float | None = None) -> None:
        with _translated():
            while pending:
                if until is not None:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError("nothing more is received after the deadline")
                    self.limit(left_s)
                count = self._sock.recvmsg_into(pending[:MAX_PARTS], 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise ConnectionError("the connection was closed")
                self.received_bytes += count
                pending = split_views(pending, count)[1]

    def _wake_after(self, count: int) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def send_bytes(self, data: bytes | memoryview) -> None:
        with _translated():
            self._sock.sendall(data)

    def send_file(self, fd: int, begin: int, count: int) -> None:
        """Bytes [begin, begin + count) of the descriptor's memory, without a copy of them here."""
        with _translated():
            while count:
                sent = os.sendfile(self._sock.fileno(), fd, begin, count)
                if not sent:
                    raise ConnectionError(f"only part of the memory could be sent: {count} bytes are missing")
                begin, count = begin + sent, count - sent
                self.sent_bytes += sent

    def cork(self, on: bool) -> None:
        """Send many small parts in full packets."""
        if self._sock.family != socket.AF_UNIX:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, int(on))

    def shut(self) -> None:
        """From any thread: calls that wait in this channel raise OSError."""
        with contextlib.suppress(OSError):  # the other side closed it first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def split_views(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes of all views, and the others."""
    for number, view in enumerate(views):
        if count < len(view):
            cut = [view[:count]] if count else []
            return [*views[:number], *cut], [view[count:], *views[number + 1 :]]
        count -= len(view)
    return [*views], []


def checked(answer: Message) -> Message:
    """Raises the error that an answer carries."""
    if "error" in answer:
        raise _ERRORS.get(str(answer["error"]), IntegrityError)(str(answer.get("message")))
    return answer


def error_message(error: ElasticError) -> Message:
    kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "IntegrityError")
    return {"error": kind, "message": str(error)}


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError("a message is not a JSON object")
    return message


def _keepalive(sock: socket.socket) -> None:
    # A node that vanished sends nothing: an idle connection to it ends after about half a minute.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class _translated:
    """A limit that ran out is EAGAIN on a blocking socket: raise TimeoutError instead."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BlockingIOError):
            raise TimeoutError("nothing moved on the connection within its limit") from error
