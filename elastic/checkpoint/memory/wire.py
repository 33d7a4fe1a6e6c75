"""Messages between workers, a node's server and the servers of other nodes.

A message is a four-byte length and as much JSON; raw bytes may follow where the message says so. Before anything else
both sides prove that they hold the run's token (HMAC-SHA256 over both sides' nonces); what follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from elastic.core.errors import ElasticError, Fenced, IntegrityError, StorageError, UsageError

Message = dict[str, Any]
Address = tuple[str, int]

TOKEN_BYTES = 32
CONNECT_LIMIT_S = 5.0
# Without a byte for so long, the other side counts as gone.
IO_LIMIT_S = 10.0

_MAGIC = b"elastic-memory-1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_LENGTH = struct.Struct("!I")
# The template of a stage-3 shard of 500 parameters takes some 100 kB.
_MAX_MESSAGE_BYTES = 256 << 20
_SOCKET_BUFFER_BYTES = 4 << 20
# Below the kernel's bound on the parts of one call (IOV_MAX).
MAX_PARTS = 512

_ERRORS: dict[str, type[ElasticError]] = {
    "UsageError": UsageError, "IntegrityError": IntegrityError, "StorageError": StorageError, "Fenced": Fenced,
}  # fmt: skip


class Refused(ConnectionError):
    """The other side does not hold this run's token."""


class Channel:
    """One connection. Calls raise OSError when it broke or a limit ran out; it is of no use after that.

    One thread may send while another receives; nothing else is shared between threads except `shut`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent_bytes = 0
        # Not settimeout(): that makes the descriptor non-blocking, which sendfile and MSG_WAITALL do not go with.
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
        """Waits for the next message; True when none came."""
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
                    raise ConnectionError(f"a message of {length} bytes was announced, which nobody here sends")
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

    def exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.recv_into([memoryview(data)])
        return bytes(data)

    def recv_into(self, views: Sequence[memoryview]) -> None:
        """Fills all views, one after the other."""
        pending = [view for view in views if len(view)]
        with _translated():
            while pending:
                count = self._sock.recvmsg_into(pending[:MAX_PARTS], 0, socket.MSG_WAITALL)[0]
                if not count:
                    raise ConnectionError("the connection was closed")
                pending = after(pending, count)

    def send_bytes(self, data: bytes) -> None:
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
        """Let many small pieces leave in full packets."""
        if self._sock.family != socket.AF_UNIX:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, int(on))

    def shut(self) -> None:
        """From any thread: whoever waits in this channel stops waiting, with an error."""
        with contextlib.suppress(OSError):  # the other side was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is still to be filled when `count` bytes have come."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def connect(target: Address | str, token: bytes, *, limit_s: float = CONNECT_LIMIT_S) -> Channel:
    """To a server's TCP address, or to the abstract Unix socket of that name. Raises OSError; `Refused` for the token.

    The limit is one for reaching the server and for each message of the proof.
    """
    if isinstance(target, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: Any = b"\0" + target.encode()
    else:
        sock = socket.socket(_family(target[0]), socket.SOCK_STREAM)
        big_buffers(sock)
        address = target
    try:
        sock.settimeout(limit_s)
        sock.connect(address)
        channel = Channel(sock)
        channel.limit(limit_s)
        _prove(channel, token)
        channel.limit(IO_LIMIT_S)
    except BaseException:
        sock.close()
        raise
    return channel


def admit(channel: Channel, token: bytes) -> None:
    """The server's side of the proof. Raises `Refused` or another OSError."""
    channel.limit(CONNECT_LIMIT_S)
    nonce = os.urandom(_NONCE_BYTES)
    channel.send_bytes(_MAGIC + nonce)
    answer = channel.exactly(_NONCE_BYTES + _MAC_BYTES)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(token, b"client", nonces)):
        raise Refused("it does not hold this run's token")
    channel.send_bytes(_mac(token, b"server", nonces))
    channel.limit(IO_LIMIT_S)


def checked(answer: Message) -> Message:
    """Raises the error that an answer carries."""
    if "error" in answer:
        raise _ERRORS.get(str(answer["error"]), IntegrityError)(str(answer.get("message")))
    return answer


def error_message(error: ElasticError) -> Message:
    kind = next((name for name, known in _ERRORS.items() if isinstance(error, known)), "IntegrityError")
    return {"error": kind, "message": str(error)}


def big_buffers(sock: socket.socket) -> None:
    """To be called before connecting or listening: the window is agreed on then."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def _prove(channel: Channel, token: bytes) -> None:
    greeting = channel.exactly(len(_MAGIC) + _NONCE_BYTES)
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise Refused("what listens there is no memory server of this version")
    own = os.urandom(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + own
    channel.send_bytes(own + _mac(token, b"client", nonces))
    try:
        proof = channel.exactly(_MAC_BYTES)
    except ConnectionError as error:
        raise Refused("the server did not accept this run's token") from error
    if not hmac.compare_digest(proof, _mac(token, b"server", nonces)):
        raise Refused("the server does not hold this run's token")


def _mac(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(token, _MAGIC + role + nonces, hashlib.sha256).digest()


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError("a message is not a JSON object")
    return message


def _keepalive(sock: socket.socket) -> None:
    # A node that vanished sends no goodbye: an idle connection to it ends after about half a minute.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _translated:
    """A limit that ran out is EAGAIN on a blocking socket; say what it means."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BlockingIOError):
            raise TimeoutError("nothing moved on the connection within its limit") from error
