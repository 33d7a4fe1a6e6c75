"""The handshake: both sides prove that they hold the run's token (HMAC-SHA256 over the nonces of both).

The connection is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from typing import Any

from elastic.transport.channel import IO_LIMIT_S, Channel

Address = tuple[str, int]

TOKEN_BYTES = 32
CONNECT_LIMIT_S = 5.0

_MAGIC = b"elastic-memory-2"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_SOCKET_BUFFER_BYTES = 4 << 20


class Refused(ConnectionError):
    """The other side does not hold this run's token."""


def connect(target: Address | str, token: bytes, *, limit_s: float = CONNECT_LIMIT_S) -> Channel:
    """To a server's TCP address, or to the abstract Unix socket of that name. Raises OSError; `Refused` for the token.

    `limit_s` bounds reaching the server, and then the whole handshake.
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
        _authenticate(channel, token, time.monotonic() + limit_s)
        channel.limit(IO_LIMIT_S)
    except BaseException:
        sock.close()
        raise
    return channel


def admit(channel: Channel, token: bytes) -> None:
    """The server's side of the handshake, which has one deadline. Raises `Refused` or another OSError."""
    until = time.monotonic() + CONNECT_LIMIT_S
    channel.limit(CONNECT_LIMIT_S)
    nonce = os.urandom(_NONCE_BYTES)
    channel.send_bytes(_MAGIC + nonce)
    answer = channel.exactly(_NONCE_BYTES + _MAC_BYTES, until)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(token, b"client", nonces)):
        raise Refused("it does not hold this run's token")
    channel.send_bytes(_mac(token, b"server", nonces))
    channel.limit(IO_LIMIT_S)


def big_buffers(sock: socket.socket) -> None:
    """Call this before connecting or listening: the window is negotiated then."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def _authenticate(channel: Channel, token: bytes, until: float) -> None:
    greeting = channel.exactly(len(_MAGIC) + _NONCE_BYTES, until)
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise Refused("the server there is not a snapshot server of this version")
    own = os.urandom(_NONCE_BYTES)
    nonces = greeting[len(_MAGIC) :] + own
    channel.send_bytes(own + _mac(token, b"client", nonces))
    try:
        proof = channel.exactly(_MAC_BYTES, until)
    except ConnectionError as error:
        raise Refused("the server did not accept this run's token") from error
    if not hmac.compare_digest(proof, _mac(token, b"server", nonces)):
        raise Refused("the server does not hold this run's token")


def _mac(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(token, _MAGIC + role + nonces, hashlib.sha256).digest()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
