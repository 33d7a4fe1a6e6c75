"""Who may talk to a server, and what a message may look like."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any, get_args

import memory_samples as samples
import pytest
from memory_samples import TOKEN, held, snap, take, template

from elastic.checkpoint.memory.messages import (
    BeginSnapshot,
    CommitSnapshot,
    LeaseShard,
    OpenParity,
    OpenReplica,
    OpenShard,
    PeerRequest,
    ProbeReceiving,
    ProbeSending,
    PushReplica,
    PushShare,
    ReadShard,
    Request,
    SettleSnapshot,
    WorkerRequest,
    peer_request,
    request_to_json,
    worker_request,
)
from elastic.checkpoint.memory.records import template_from_json, template_to_json
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.checkpoint.memory.snapshot_client import SnapshotClient
from elastic.core.errors import IntegrityError, StorageError, UsageError
from elastic.transport import listener as server_module
from elastic.transport.channel import Channel
from elastic.transport.handshake import Refused, admit, connect

OTHER = bytes(32)


@pytest.fixture
def node() -> Iterator[SnapshotServer]:
    with closing(samples.server()) as node:
        yield node


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def test_another_runs_token_is_refused(node: SnapshotServer, caplog: pytest.LogCaptureFixture) -> None:
    for target in (node.address, node.local_name):
        with pytest.raises(Refused, match="did not accept this run's token"):
            connect(target, OTHER)
    with pytest.raises(StorageError, match="did not accept"):
        SnapshotClient(node.local_name, OTHER)
    node.close()
    assert caplog.messages.count("a connection was refused: it does not hold this run's token") == 3
    for secret in (TOKEN, OTHER):
        assert secret.hex() not in caplog.text
        assert repr(secret) not in caplog.text


def test_a_server_without_the_token_is_refused() -> None:
    """It sees the client's proof, and cannot answer with that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reflect() -> None:
            near, _ = listener.accept()
            with near, suppress(OSError):
                near.sendall(b"elastic-memory-2" + bytes(32))
                near.sendall(near.recv(64, socket.MSG_WAITALL)[32:])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(Refused, match="the server does not hold this run's token"):
            connect(("127.0.0.1", listener.getsockname()[1]), TOKEN)
        thread.join(30)


@pytest.mark.parametrize("rubbish", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(64)), b"\0" * 4096])
def test_rubbish_does_no_harm(node: SnapshotServer, rubbish: bytes) -> None:
    for family, address in ((socket.AF_INET, node.address), (socket.AF_UNIX, "\0" + node.local_name)):
        with socket.socket(family) as sock:
            sock.connect(address)
            with suppress(OSError):
                sock.sendall(rubbish)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    assert_serves(node)


@pytest.mark.parametrize(
    "message",
    [{}, {"do": "open"}, {"do": "push"}, {"do": "read", "generation": "x"}, {"do": "begin"}, {"do": "format"}],
)
def test_requests_that_make_no_sense_do_no_harm(node: SnapshotServer, message: dict[str, object]) -> None:
    for target in (node.address, node.local_name):
        with closing(connect(target, TOKEN)) as channel:
            channel.send(message)
            try:
                answer, _ = channel.receive()
            except OSError:
                continue  # it was dropped
            assert "error" in answer.get("answer", answer)
    assert_serves(node)


REQUESTS = [
    OpenShard(replace(template(0), step=0), (("10.0.0.1", 5),), (1, 2), (0, 1), (("10.0.0.2", 6),)),
    BeginSnapshot(),
    CommitSnapshot(3, {"loss": [1, 2.5, None]}),
    SettleSnapshot(3),
    LeaseShard(1, 2, 0),
]
PEER_REQUESTS = [
    OpenReplica(template(1), None),
    OpenParity((0, 1), template(1), (1, 2)),
    PushReplica(4, None, (-1, -1)),
    PushShare(4, {}, (1, 3)),
    ReadShard(1, 2, 0, ((0, 8, 1, 0), (16, 4, 3, 8))),
    ProbeSending(1024),
    ProbeReceiving(1024),
]


def sent(request: Request) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(request_to_json(request)))
    return data


def test_every_request_arrives_as_it_was_sent() -> None:
    assert {type(each) for each in REQUESTS} == set(get_args(WorkerRequest)), "a verb without a test"
    assert {type(each) for each in PEER_REQUESTS} == set(get_args(PeerRequest)), "a verb without a test"
    for request in REQUESTS:
        assert worker_request(sent(request)) == request
    for peer in PEER_REQUESTS:
        assert peer_request(sent(peer)) == peer


@pytest.mark.parametrize("request_", [*REQUESTS, *PEER_REQUESTS], ids=lambda each: each.do)
def test_a_request_with_other_fields_is_refused(request_: Request) -> None:
    read: Any = worker_request if request_ in REQUESTS else peer_request
    data = sent(request_)
    with pytest.raises(IntegrityError, match="other fields"):
        read({**data, "extra": 1})
    for name in data.keys() - {"do"}:
        with pytest.raises(IntegrityError, match="other fields"):
            read({key: value for key, value in data.items() if key != name})
        with pytest.raises(IntegrityError):
            read({**data, name: "a text where none belongs"})
    for verb in (None, 1, "format", ["open"]):
        with pytest.raises(IntegrityError, match="not one that may come here"):
            read({**data, "do": verb})


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, [1]])
def test_a_number_that_is_not_one_is_refused(step: object) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        worker_request({"do": "settle", "step": step})


def test_a_length_that_nobody_sends_is_refused() -> None:
    near, far = pair()
    with closing(Channel(near)) as channel, far:
        far.sendall(struct.pack("!I", 2**32 - 1))
        with pytest.raises(ConnectionError, match="4294967295 bytes was announced"):
            channel.receive()


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff\xff", b"1" * 5000])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    near, far = pair()
    with closing(Channel(near)) as channel, far:
        far.sendall(struct.pack("!I", len(text)) + text)
        with pytest.raises(ConnectionError, match="not"):
            channel.receive()


def test_a_descriptor_that_came_with_a_broken_message_is_closed() -> None:
    near, far = pair()
    opened = len(os.listdir("/proc/self/fd"))
    with closing(Channel(near)) as channel, far:
        socket.send_fds(far, [struct.pack("!I", 1) + b"{"], [far.fileno()])
        with pytest.raises(ConnectionError):
            channel.receive()
        assert len(os.listdir("/proc/self/fd")) == opened


def tcp_pair() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return Channel(near), Channel(listener.accept()[0])


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "sizes", [[1], [(512 << 10) - 1], [512 << 10, 1], [0, 3, (1 << 20) + 5, 0, 256 << 10], [5] * 2000 + [5 << 20]]
)
@pytest.mark.parametrize("piece", [40_961, 1 << 20])
def test_bytes_arrive_whole_however_they_are_cut(sizes: list[int], piece: int) -> None:
    """And the messages behind them: nobody waits for more bytes than come, which only the limit would end."""
    sent = random.Random(7).randbytes(sum(sizes))
    near, far = tcp_pair()
    with closing(near) as sender, closing(far) as receiver:
        receiver.limit(60.0)

        def send() -> None:
            for at in range(0, len(sent), piece):
                sender.send_bytes(sent[at : at + piece])
            sender.send({"then": 1})

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        parts = [bytearray(size) for size in sizes]
        receiver.recv_into([memoryview(part) for part in parts])
        assert b"".join(parts) == sent
        assert receiver.receive()[0] == {"then": 1}
        thread.join()


def test_who_receives_many_bytes_is_not_woken_for_each_packet() -> None:
    data = memoryview(bytearray(4 << 20))
    near, far = tcp_pair()
    with closing(near) as sender, closing(far) as receiver, socket.socket(fileno=os.dup(far.fileno())) as seen:

        def woken_after() -> int:
            return seen.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

        assert woken_after() == 1
        thread = threading.Thread(target=receiver.recv_into, args=([data],), daemon=True)
        thread.start()
        deadline = time.monotonic() + 10.0
        while woken_after() < 64 << 10:
            assert time.monotonic() < deadline, "the receiver never asked for more than a byte at a time"
        sender.send_bytes(bytes(len(data)))
        thread.join()
        assert woken_after() == 1


def test_a_peer_that_falls_silent_within_many_bytes_is_dropped() -> None:
    """What has come so far is less than what a receiver of many bytes is woken for."""
    near, far = tcp_pair()
    with closing(near) as sender, closing(far) as receiver:
        receiver.limit(0.2)
        sender.send_bytes(bytes(1000))
        with pytest.raises(TimeoutError, match="nothing moved"):
            receiver.recv_into([memoryview(bytearray(4 << 20))])


def test_a_peer_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.transport.handshake.CONNECT_LIMIT_S", 0.01)
    near, far = pair()
    with closing(Channel(near)) as channel, far, pytest.raises(TimeoutError, match="nothing moved"):
        admit(channel, TOKEN)


def test_another_user_is_refused(
    node: SnapshotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_user_of", lambda sock: os.geteuid() + 1)
    with pytest.raises(StorageError):
        SnapshotClient(node.local_name, TOKEN)
    node.close()
    assert f"a connection was refused: it belongs to user {os.geteuid() + 1}" in caplog.messages


def test_the_kernel_says_who_is_there() -> None:
    near, far = pair()
    with near, far:
        assert server_module._user_of(near) == os.geteuid()


def test_a_token_has_its_length() -> None:
    with pytest.raises(UsageError, match="16 bytes, not 32"):
        SnapshotServer(bytes(16), "127.0.0.1")


def test_a_reader_cannot_write(node: SnapshotServer) -> None:
    record = template(0, 1)
    with closing(SnapshotClient(node.local_name, TOKEN)) as memory, closing(connect(node.local_name, TOKEN)) as channel:
        memory.open(record, record.bytes, [])
        take(memory, record, 1)
        channel.send({"do": "lease", "generation": 1, "step": 1, "rank": 0})
        _, fd = channel.receive()
        assert fd is not None
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", 0)
            assert os.pread(fd, record.bytes, 0) == samples.content(record, 1).tobytes()
        finally:
            os.close(fd)
        assert os.get_inheritable(memory._link._channel._sock.fileno()) is False
    assert node.held() == (held(record, 1),)


def assert_serves(node: SnapshotServer) -> None:
    record = template(0, 1)
    with closing(SnapshotClient(node.local_name, TOKEN)) as memory:
        memory.open(record, record.bytes, [])
        snap(memory, record, 1)
        assert memory.wait_complete(1, 30)
    assert node.held() == (held(record, 1),)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_template_is_sent_as_it_is(rank: int) -> None:
    record = template(rank)
    assert template_from_json(json.loads(json.dumps(template_to_json(record)))) == record


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1}, {"rank": True}, {"bytes": "1"}, {"file": "../x"}, {"tensors": [["fp32/flat", "F32", 3]]},
        {"tensors": [["fp32/flat", "F31", 3, 0]]}, {"tensors": [["flat", "F32", 3, 0]]}, {"tensors": None},
        {"tensors": [["fp32/flat", "F32", 3000, 0]]}, {"pieces": [["w", 0, 2000, "flat", 0]]}, {"pieces": [[]]},
        {"pieces": [["w", 0, 1, "other", 0]]}, {"parameters": {"w": 1}}, {"parameters": [["w", [-1]]]},
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        template_from_json({**template_to_json(template(0)), **change})
    with pytest.raises(IntegrityError):
        template_from_json([])


def test_client_state_must_be_what_json_gives_back(node: SnapshotServer) -> None:
    record = template(0, 1)
    with closing(SnapshotClient(node.local_name, TOKEN)) as memory:
        memory.open(record, record.bytes, [])
        memory.segment()
        with pytest.raises(IntegrityError, match="extra_state"):
            memory.commit(1, {"loss": object()})
        with pytest.raises(UsageError, match="says 8024 bytes, but 8000"):
            memory.open(record, 8000, [])
        with pytest.raises(IntegrityError, match="ends after"):
            memory.open(replace(record, bytes=8000), 8000, [])


def test_the_nodes_side_is_light() -> None:
    code = (
        "import sys, elastic.checkpoint.memory.server.snapshot_server, elastic.checkpoint.memory.snapshot_client;"
        "assert not {'torch', 'ray', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_acceptor_that_can_start_no_thread_accepts_again(
    node: SnapshotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, 2

    def refused(self: threading.Thread) -> None:
        nonlocal failures
        if self.name == "memory connection" and failures:
            failures -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            connect(node.address, TOKEN)
    assert failures == 0
    assert_serves(node)
    assert "can't start new thread" in caplog.text
    assert not node._listener._unauthenticated


def test_a_peer_that_sends_byte_by_byte_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.transport.handshake.CONNECT_LIMIT_S", 0.05)
    near, far = pair()
    over, dribbled = threading.Event(), 0

    def dribble() -> None:
        nonlocal dribbled
        while dribbled < 60 and not over.wait(0.02):
            with suppress(OSError):
                far.send(b"x")
            dribbled += 1

    thread = threading.Thread(target=dribble)
    thread.start()
    with closing(Channel(near)) as channel, pytest.raises(TimeoutError):
        admit(channel, TOKEN)
    over.set()
    thread.join(30)
    far.close()
    assert dribbled < 60, "every byte gave the peer the whole limit again"


def test_strangers_do_not_keep_others_out(node: SnapshotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MOST_UNAUTHENTICATED", 3)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(node.address, 30)) for _ in range(5)]
        for stranger in strangers[:2]:
            while stranger.recv(4096):  # the greeting, then the end
                pass
        assert_serves(node)
        assert node.stats()["threads"] <= 3 + 2
