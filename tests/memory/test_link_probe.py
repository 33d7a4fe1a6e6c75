"""The probe of a connection, over the snapshot server's protocol and an emulated link."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest
from memory_proxy import Proxy, _shut

from elastic.checkpoint.memory.link_probe import SIZES, measure_link
from elastic.checkpoint.memory.messages import PROBE_LIMIT_BYTES, ProbeReceiving, ProbeSending, request_to_json
from elastic.checkpoint.memory.server.snapshot_server import SnapshotServer
from elastic.core.errors import ElasticError
from elastic.core.policy.calibration import Calibration
from elastic.transport.channel import checked
from elastic.transport.handshake import Address, Refused, connect

TOKEN = b"t" * 32
ALPHA_S, BETA_S = 50e-6, 1 / 2e9


class Link(Proxy):
    """Real connections, in the time of an emulated link: each change of direction takes `ALPHA_S`, each byte `BETA_S`.

    Both sides of an exchange wait for each other, so this is the time that it takes, whatever else the machine does.
    """

    def __init__(self, upstream: Address) -> None:
        self._count = threading.Lock()
        self._up: bool | None = None
        self._now = 0.0
        super().__init__(upstream)

    def clock(self) -> float:
        with self._count:
            return self._now

    def _forward(self, source: socket.socket, target: socket.socket, limit: int | None, hold: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._count:
                    self._now += len(data) * BETA_S + (ALPHA_S if self._up is not hold else 0.0)
                    self._up = hold
                target.sendall(data)
        _shut(source)
        _shut(target)


def test_latency_and_bandwidth_of_an_emulated_link() -> None:
    server = SnapshotServer(TOKEN, "127.0.0.1")
    link = Link(server.address)
    try:
        sent, received = measure_link(link.address, TOKEN, link.clock)
    finally:
        link.close()
        server.close()
    hops = Calibration("n", (), "p", "other", sent, received).hops
    for hop in hops.values():
        assert hop.alpha_s == pytest.approx(ALPHA_S, rel=0.1)
        assert hop.beta_s_per_byte == pytest.approx(BETA_S, rel=0.1)
    assert hops.keys() == {"sending", "receiving"}


def test_each_size_is_measured_both_ways() -> None:
    server = SnapshotServer(TOKEN, "127.0.0.1")
    threads = threading.active_count()
    try:
        sent, received = measure_link(server.address, TOKEN)
    finally:
        server.close()
    assert [size for size, _ in sent] == [size for size, _ in received] == list(SIZES)
    assert all(seconds > 0 for _, seconds in (*sent, *received))
    assert threading.active_count() <= threads


def test_nobody_without_the_token_is_answered() -> None:
    server = SnapshotServer(TOKEN, "127.0.0.1")
    try:
        with pytest.raises((Refused, ConnectionError)):
            measure_link(server.address, b"x" * 32)
    finally:
        server.close()


@pytest.mark.parametrize("probe", [ProbeSending, ProbeReceiving])
def test_a_probe_of_any_size_is_not_taken(probe: type[ProbeSending] | type[ProbeReceiving]) -> None:
    server = SnapshotServer(TOKEN, "127.0.0.1")
    channel = connect(server.address, TOKEN)
    try:
        with pytest.raises(ElasticError, match="a probe of"):
            channel.ask(request_to_json(probe(PROBE_LIMIT_BYTES + 1)))
    finally:
        channel.close()
        server.close()


def test_the_connection_is_good_for_other_requests_after_a_probe() -> None:
    server = SnapshotServer(TOKEN, "127.0.0.1")
    channel = connect(server.address, TOKEN)
    try:
        for _ in range(3):
            channel.send(request_to_json(ProbeReceiving(1000)))
            assert channel.exactly(1000) == bytes(1000)
            checked(channel.receive()[0])
    finally:
        channel.close()
        server.close()
