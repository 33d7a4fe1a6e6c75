"""Latency and bandwidth of each kind of message, measured as the strategies send them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from elastic.comm.strategies.messages import Messages
from elastic.core.policy.hops import BACKEND, NODE, NODES, RANKS, Hop, Islands, fit_hop

# Three sizes are enough for a latency and a bandwidth (within 8 % of fourteen, H100 nccl-tests).
SIZES = (4 << 10, 128 << 10, 2 << 20)
_REPETITIONS = 3


def measure_hops(islands: Islands, messages: Messages, device: torch.device) -> tuple[dict[str, Hop], float]:
    """By kind, of the slowest rank, and how long measuring them took (seconds): the same on every rank. Collective;
    about 40 messages."""
    kinds = _kinds(islands, messages)
    # The first message of a kind may open a connection.
    measured = [
        seconds(partial(send, torch.zeros(size // 4, device=device)), device)
        for send in kinds.values()
        for size in SIZES
        for _ in range(_REPETITIONS + 1)
    ]
    slowest = iter(messages.slowest(measured, device))
    hops, spent_s = {}, 0.0
    for kind in kinds:
        points = []
        for size in SIZES:
            times = [next(slowest) for _ in range(_REPETITIONS + 1)]
            points.append((float(size), max(median(times[1:]), 1e-9)))
            spent_s += sum(times)
        hops[kind] = fit_hop(points)
    return hops, spent_s


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, to the end of what it has enqueued."""
    _synchronize(device)
    began = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - began


def _kinds(islands: Islands, messages: Messages) -> dict[str, Callable[[Tensor], object]]:
    rank, count = messages.rank, messages.ranks
    number, _ = islands.find(rank)
    rings: dict[str, tuple[int, ...]] = {RANKS: tuple(range(count))}
    if islands.width > 1 and islands.count > 1:
        rings |= {NODE: islands.places[number], NODES: islands.lane(rank)}
    kinds: dict[str, Callable[[Tensor], object]] = {BACKEND: messages.all_reduce}
    return kinds | {kind: partial(_to_the_next, messages, members) for kind, members in rings.items()}


def _to_the_next(messages: Messages, members: tuple[int, ...], tensor: Tensor) -> None:
    at = members.index(messages.rank)
    messages.exchange(tensor, members[(at + 1) % len(members)], tensor, members[at - 1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
