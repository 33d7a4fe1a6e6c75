"""A server's sockets and threads: connections are admitted by the run's token, and served by a thread each."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from elastic.core.errors import UsageError
from elastic.transport.channel import Channel
from elastic.transport.handshake import TOKEN_BYTES, Address, Refused, admit, big_buffers

logger = logging.getLogger(__name__)

_BACKLOG = 512
# Limit of connections in their handshake; each has a thread. A holder of the token needs milliseconds for it.
_MOST_UNAUTHENTICATED = 256
_PAUSE_S = 0.1


class Listener:
    """Listens on (host, free port) and, with `local_name`, on that abstract Unix socket, for processes of this user.

    `serve(channel, local)` runs in a thread of its own until it returns or raises; an OSError is a connection's end.
    """

    def __init__(
        self,
        token: bytes,
        host: str,
        serve: Callable[[Channel, bool], None],
        *,
        name: str,
        local_name: str | None = None,
    ) -> None:
        if len(token) != TOKEN_BYTES:
            raise UsageError(f"the run's token has {len(token)} bytes, not {TOKEN_BYTES}")
        self._token = token
        self._serve = serve
        self._name = name
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        # In the order of their arrival.
        self._unauthenticated: dict[Channel, None] = {}
        self._threads: set[threading.Thread] = set()
        self._sent_bytes = 0
        self._closed = False
        tcp = _listen_tcp(host)
        self.address: Address = (host, tcp.getsockname()[1])
        self._sockets = [tcp] if local_name is None else [tcp, _listen_unix(local_name)]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(target=self._accept, name=f"{name} server", daemon=True)
        self._acceptor.start()

    def stats(self) -> dict[str, int]:
        """Bytes sent by connections that have ended, and how many connections and threads there are."""
        with self._lock:
            return {
                "sent_bytes": self._sent_bytes,
                "connections": len(self._channels),
                "threads": len(self._threads) + 1,
            }

    def shut(self) -> None:
        """End all connections and accept no more; `close` waits for the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
            for channel in self._channels:
                channel.shut()

    def close(self, limit_s: float) -> bool:
        """True when all threads have ended."""
        self.shut()
        deadline = time.monotonic() + limit_s
        self._acceptor.join(limit_s)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for sock in self._sockets:
            sock.close()
        os.close(self._wake)
        return not any(thread.is_alive() for thread in threads)

    def _accept(self) -> None:
        poll = select.poll()
        for fd in (*(sock.fileno() for sock in self._sockets), self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake in ready:
                return
            for listener in self._sockets:
                if listener.fileno() in ready:
                    self._take(listener)

    def _take(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            self._wait_for_resources(error)  # out of descriptors
            return
        try:
            channel = Channel(sock)
        except OSError:  # the other side is gone already
            sock.close()
            return
        thread = threading.Thread(
            target=self._connected, args=(channel, sock), name=f"{self._name} connection", daemon=True
        )
        with self._lock:
            self._channels.add(channel)
            self._threads.add(thread)
            self._unauthenticated[channel] = None
            if self._closed:
                channel.shut()
            while len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
                self._drop_oldest_unauthenticated()
        try:
            thread.start()
        except (
            RuntimeError
        ) as error:  # out of processes, perhaps because of unauthenticated connections that keep their threads
            with self._lock:
                self._forget(channel, thread)
                if self._unauthenticated:
                    self._drop_oldest_unauthenticated()
            channel.close()
            self._wait_for_resources(error)

    def _wait_for_resources(self, error: Exception) -> None:
        """Retry a little later instead of at once; `close` ends the wait."""
        logger.warning("a connection could not be accepted: %s", error)
        select.select([self._wake], [], [], _PAUSE_S)

    def _drop_oldest_unauthenticated(self) -> None:
        channel = next(iter(self._unauthenticated))
        del self._unauthenticated[channel]
        channel.shut()

    def _forget(self, channel: Channel, thread: threading.Thread) -> None:
        self._channels.discard(channel)
        self._threads.discard(thread)
        self._unauthenticated.pop(channel, None)
        self._sent_bytes += channel.sent_bytes

    def _connected(self, channel: Channel, sock: socket.socket) -> None:
        try:
            local = sock.family == socket.AF_UNIX
            if local and _user_of(sock) != os.geteuid():
                raise Refused(f"it belongs to user {_user_of(sock)}")
            admit(channel, self._token)
            with self._lock:
                self._unauthenticated.pop(channel, None)
            self._serve(channel, local)
        except Refused as error:
            logger.warning("a connection was refused: %s", error)
        except OSError as error:
            logger.debug("a connection ended: %s", error)
        except Exception:
            logger.exception("a connection is closed after a request that could not be understood")
        finally:
            with self._lock:
                self._forget(channel, threading.current_thread())
            channel.close()


def _listen_tcp(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    big_buffers(sock)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(b"\0" + name.encode())
    sock.listen(_BACKLOG)
    return sock


def _user_of(sock: socket.socket) -> int:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    return int(user)
