"""What a fork server forks a worker for, and what it refuses; and what a launcher does where it gets no answer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.runtime.worker import fork_launch
from elastic.runtime.worker.fork_main import Request, obstacle, receive

ENVIRONMENT = {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
ASKED = Request(["/ray/default_worker.py", "--x"], ENVIRONMENT, "/job", 15, True, [], (7, 8, 9))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (ASKED, None),
        (replace(ASKED, environment={**ENVIRONMENT, "SHLVL": "1", "_": "/bin/python"}), None),
        (replace(ASKED, environment={"PATH": "/bin", "NCCL_DEBUG": "WARN"}), "its environment differs in NCCL_DEBUG"),
        (replace(ASKED, environment={**ENVIRONMENT, "OMP_NUM_THREADS": "4"}), "differs in OMP_NUM_THREADS"),
        (replace(ASKED, folder="/tmp"), "its working directory is /tmp, not /job"),
        (replace(ASKED, arguments=["-s", "/ray/default_worker.py"]), "Python is to be started with -s"),
        (replace(ASKED, streams=(7,)), "1 descriptors came with the request"),
    ],
)
def test_only_the_same_process_is_forked(asked: Request, why: str | None) -> None:
    """Libraries have read the environment while they were imported. A value may be a secret and is not told."""
    found = obstacle(asked, ENVIRONMENT, "/job")
    assert (found is None) == (why is None)
    assert why is None or (found is not None and why in found and "WARN" not in found)


class Server:
    """Answers one launcher on a thread, as `answer` says, which gets the request."""

    def __init__(self, folder: Path, answer: Callable[[socket.socket, Request], None]) -> None:
        self.address = str(folder / "forks")
        self.requests: list[Request] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            request = receive(connection)
            for descriptor in request.streams:
                os.close(descriptor)
            self.requests.append(request)
            self._answer(connection, request)

    def join(self) -> None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()


def test_a_request_tells_all_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOT_TEXT", os.fsdecode(b"\xff\xfe"))
    monkeypatch.setenv("LONG", "x" * 1_000_00)
    agreed: list[bytes] = []

    def forks(connection: socket.socket, request: Request) -> None:
        connection.sendall(fork_launch.READY)
        agreed.append(connection.recv(1))
        connection.sendall(fork_launch.FORKED)

    server = Server(tmp_path, forks)
    assert fork_launch.ask(server.address, ["worker.py", "--worker-id", "1"])
    server.join()
    (request,) = server.requests
    assert agreed == [fork_launch.AGREED]
    assert request.arguments == ["worker.py", "--worker-id", "1"]
    assert request.environment == dict(os.environ)
    assert request.folder == os.getcwd()
    assert request.niceness == os.getpriority(os.PRIO_PROCESS, 0)
    assert len(request.streams) == 3


def test_a_launcher_that_has_waited_for_too_long_agrees_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the worker itself by then, and a second one must not be forked."""
    monkeypatch.setattr(fork_launch, "_LIMIT_S", 0.05)
    gone, heard = threading.Event(), []

    def slow(connection: socket.socket, request: Request) -> None:
        assert gone.wait(10.0)
        try:
            connection.sendall(fork_launch.READY)
            heard.append(connection.recv(1))
        except OSError:
            heard.append(b"")

    server = Server(tmp_path, slow)
    assert not fork_launch.ask(server.address, ["worker.py"])
    gone.set()
    server.join()
    assert heard == [b""]


def test_without_an_answer_the_launcher_is_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: became.append(arguments))
    fork_launch.main(str(tmp_path / "nobody"), ["worker.py", "--x"])
    server = Server(tmp_path, lambda connection, request: None)
    fork_launch.main(server.address, ["worker.py", "--y"])
    server.join()
    assert [arguments[1:] for arguments in became] == [["worker.py", "--x"], ["worker.py", "--y"]]


def test_what_is_no_request_is_an_error(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall((10).to_bytes(4, "big") + b"{}")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive(ours)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        theirs.sendall((2).to_bytes(4, "big") + b"[]")
        with pytest.raises((TypeError, ValueError)):
            receive(ours)
