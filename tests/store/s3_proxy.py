"""A proxy between an S3 client and its server: counts requests, and lets chosen ones fail over real HTTP.

It understands as much of HTTP/1.1 as the two ends use: one request after the other on a connection, bodies with a
length or in chunks.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import parse_qs, urlsplit


class Trouble(Enum):
    """What becomes of one request."""

    SLOW_DOWN = (503, "SlowDown")
    INTERNAL = (500, "InternalError")
    TIMEOUT = (400, "RequestTimeout")
    DENIED = (403, "AccessDenied")
    EXPIRED = (403, "ExpiredToken")
    NOT_IMPLEMENTED = (501, "NotImplemented")
    CUT_UPLOAD = "the connection is closed after half of the request's body"
    LOST_ANSWER = "the server has done it, and the connection is closed before it can say so"
    STALL = "no answer, for ever"
    TRUNCATE = "half of the answer's body, and the length of the half"
    CUT_ANSWER = "half of the answer's body, and the connection is closed"
    UNCONDITIONAL = "the condition is taken out of the request: stores that know none"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]

    @property
    def operation(self) -> str:
        """S3's name for it."""
        names = {
            ("GET", "list-type"): "ListObjects",
            ("GET", "uploads"): "ListUploads",
            ("POST", "uploads"): "CreateUpload",
            ("PUT", "uploadId"): "UploadPart",
            ("POST", "uploadId"): "CompleteUpload",
            ("DELETE", "uploadId"): "AbortUpload",
            ("POST", "delete"): "DeleteObjects",
        }
        plain = {"GET": "GetObject", "PUT": "PutObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
        found = next((name for (method, key), name in names.items() if method == self.method and key in self.query), "")
        return found or plain.get(self.method, self.method)


Decide = Callable[[Request], "Trouble | None"]


def fine(request: Request) -> Trouble | None:
    return None


def first(times: int, trouble: Trouble, operation: str, part: str = "") -> Decide:
    """The first `times` requests of that operation whose path holds `part` go wrong."""
    lock, left = threading.Lock(), [times]

    def decide(request: Request) -> Trouble | None:
        if request.operation != operation or part not in request.path:
            return None
        with lock:
            left[0] -= 1
            return trouble if left[0] >= 0 else None

    return decide


@dataclass
class Proxy:
    """`decide` is asked about every request; `seen` holds those that came."""

    server_port: int
    decide: Decide = fine
    seen: list[Request] = field(default_factory=list)
    port: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def operations(self) -> list[str]:
        return [request.operation for request in self.seen]


@contextlib.contextmanager
def proxy_of(server_port: int) -> Iterator[Proxy]:
    proxy = Proxy(server_port)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                _serve(proxy, self)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is no error here."""

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.over.set()
            server.shutdown()


def _serve(proxy: Proxy, client: Any) -> None:
    with socket.create_connection(("127.0.0.1", proxy.server_port)) as upstream, upstream.makefile("rb") as answers:
        while head := _head(client.rfile):
            request = _request(head)
            proxy.seen.append(request)
            trouble = proxy.decide(request)
            if trouble is Trouble.STALL:
                proxy.over.wait()
                return
            if "100-continue" in request.headers.get("expect", ""):
                client.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if trouble is Trouble.CUT_UPLOAD:
                client.rfile.read(int(request.headers.get("content-length", "0")) // 2)
                return
            body = _body(client.rfile, request.headers)
            if trouble is not None and isinstance(trouble.value, tuple):
                client.wfile.write(_refusal(*trouble.value))
                continue
            upstream.sendall(_forwarded(head, trouble) + body)
            _answer(proxy, client, answers, request, trouble)
            if trouble in (Trouble.LOST_ANSWER, Trouble.CUT_ANSWER):
                return


def _answer(proxy: Proxy, client: Any, answers: Any, request: Request, trouble: Trouble | None) -> None:
    head = _head(answers)
    headers = _headers(head)
    body = b"" if request.method == "HEAD" else _body(answers, headers)
    if trouble is Trouble.LOST_ANSWER:
        return
    if trouble is Trouble.TRUNCATE:
        body, told = body[: len(body) // 2], (b"content-length", b"x-amz-checksum")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(told)]
        head = b"\r\n".join([*lines[:-2], b"Content-Length: %d" % len(body), b"", b""])
    if trouble is Trouble.CUT_ANSWER:
        body = body[: len(body) // 2]
    client.wfile.write(head + body)
    client.wfile.flush()


def _head(file: Any) -> bytes:
    lines = []
    while (line := file.readline()) not in (b"", b"\r\n"):
        lines.append(line)
    return b"".join([*lines, b"\r\n"]) if lines else b""


def _request(head: bytes) -> Request:
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
    parts = urlsplit(target)
    return Request(method, parts.path, parse_qs(parts.query, keep_blank_values=True), _headers(head))


def _headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    return {name.decode().lower(): value.decode().strip() for name, _, value in lines}


def _body(file: Any, headers: dict[str, str]) -> bytes:
    """As it is on the wire."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        found: bytes = file.read(int(headers.get("content-length", "0")))
        return found
    taken = []
    while True:
        size = file.readline()
        taken.append(size)
        count = int(size.split(b";")[0], 16)
        taken.append(file.read(count + 2) if count else _head(file) or b"\r\n")
        if not count:
            return b"".join(taken)


def _forwarded(head: bytes, trouble: Trouble | None) -> bytes:
    lines = head.split(b"\r\n")
    # The proxy has answered it already.
    hidden = [b"expect:"] + ([b"if-none-match:"] if trouble is Trouble.UNCONDITIONAL else [])
    return b"\r\n".join(line for line in lines if not line.lower().startswith(tuple(hidden)))


def _refusal(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} as asked for</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
