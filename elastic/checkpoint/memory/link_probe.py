"""The connection between two nodes, measured over the snapshot server's own authenticated protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

from elastic.checkpoint.memory.messages import ProbeReceiving, ProbeSending, request_to_json
from elastic.transport.channel import Channel, checked
from elastic.transport.handshake import Address, connect

# Three sizes are enough for a latency and a bandwidth (within 8 % of fourteen, H100 nccl-tests).
SIZES = (1 << 10, 256 << 10, 4 << 20)
_WARM, _COUNTED = 2, 5
# Of one size and direction: a slow connection is measured fewer times.
_LIMIT_S = 0.6

# (bytes, seconds) of one way.
Points = tuple[tuple[int, float], ...]
Clock = Callable[[], float]


def measure_link(target: Address, token: bytes, clock: Clock = time.perf_counter) -> tuple[Points, Points]:
    """What is sent to the server at `target`, and what is received from it: of each size the best exchange, less the
    way back of a small message, which is half of the best exchange of one byte. Raises OSError."""
    with closing(connect(target, token)) as channel:
        back_s = _best_s(partial(_send, channel, bytes(1)), clock) / 2
        sent = {size: _best_s(partial(_send, channel, bytes(size)), clock) for size in SIZES}
        room = memoryview(bytearray(max(SIZES)))
        received = {size: _best_s(partial(_receive, channel, room[:size]), clock) for size in SIZES}
    return _one_way(sent, back_s), _one_way(received, back_s)


def _one_way(exchanges: Mapping[int, float], back_s: float) -> Points:
    """The way back is never the longer one: that bounds what noise does to the smallest sizes."""
    return tuple((size, max(seconds - back_s, seconds / 2)) for size, seconds in exchanges.items())


def _send(channel: Channel, payload: bytes) -> None:
    channel.send(request_to_json(ProbeSending(len(payload))))
    channel.send_bytes(payload)
    checked(channel.receive()[0])


def _receive(channel: Channel, room: memoryview) -> None:
    channel.send(request_to_json(ProbeReceiving(len(room))))
    channel.recv_into([room])
    checked(channel.receive()[0])


def _best_s(exchange: Callable[[], None], clock: Clock) -> float:
    taken: list[float] = []
    began = clock()
    while len(taken) < _WARM + _COUNTED and (len(taken) <= _WARM or clock() - began < _LIMIT_S):
        before = clock()
        exchange()
        taken.append(clock() - before)
    return min(taken[_WARM:])
