"""A TCP proxy whose both directions can be held after a number of bytes: faults are placed by bytes, not by time."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from elastic.transport.handshake import Address


class Proxy:
    """Forwards one connection after the other to `upstream`.

    Of the first connection it passes on `pass_bytes` towards upstream; then `reached` is set and it waits for `go`.
    With `answer_bytes` it closes the first connection once so many bytes of answers were passed on.
    """

    def __init__(self, upstream: Address, *, pass_bytes: int | None = None, answer_bytes: int | None = None) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self._upstream = upstream
        self._pass_bytes, self._answer_bytes = pass_bytes, answer_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = ("127.0.0.1", self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut(self) -> None:
        """The connections of now break; what was held back is not passed on. New ones go through."""
        for sock in list(self._sockets):
            _shut(sock)
        self.go.set()

    def close(self) -> None:
        """What was held back is not passed on. Idempotent."""
        for sock in [self._listener, *self._sockets]:
            _shut(sock)
        self.go.set()
        for thread in list(self._threads):
            thread.join(30)
            assert not thread.is_alive()
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _accept(self) -> None:
        first = True
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._upstream, timeout=30)
            except OSError:
                near.close()
                continue
            near.settimeout(None)
            far.settimeout(None)
            self._sockets += [near, far]
            self._start(self._forward, near, far, self._pass_bytes if first else None, True)
            self._start(self._forward, far, near, self._answer_bytes if first else None, False)
            first = False

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None, hold: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16 if limit is None else min(1 << 16, max(1, limit - passed))):
                if limit is not None and passed >= limit:
                    if not hold:
                        break
                    self.reached.set()
                    self.go.wait(60)
                    limit = None
                target.sendall(data)
                passed += len(data)
        _shut(source)
        _shut(target)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


class SlowProxy(Proxy):
    """A slow network: what comes from upstream is passed on in chunks of 1 / `chunks` MiB, each after a pause."""

    def __init__(self, upstream: Address, *, chunks: int, pause_s: float) -> None:
        self._piece_bytes, self._pause_s = (1 << 20) // chunks, pause_s
        super().__init__(upstream)

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None, hold: bool) -> None:
        with suppress(OSError):
            while data := source.recv(self._piece_bytes):
                if not hold and len(data) > 1 << 12:
                    # Set when the proxy closes: nobody waits for a network that is gone.
                    self.go.wait(self._pause_s)
                target.sendall(data)
        _shut(source)
        _shut(target)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
