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
_SMALLER, _LARGEST = (4 << 10, 128 << 10), 2 << 20
_REPETITIONS, _AGAIN = 3, 2


def measure_hops(
    islands: Islands, messages: Messages, device: torch.device, largest: int, again: bool
) -> tuple[dict[str, Hop], float]:
    """By kind, of the slowest rank, and how long measuring them took (seconds): the same on every rank. Collective.

    `largest`: bytes of the largest message that a ring would send, beyond which nothing is to be known. About 40
    messages the first time; `again`, when every connection is open, half as many.
    """
    kinds, sizes = _kinds(islands, messages), _sizes(largest)
    # The first message of a kind may open a connection.
    warm_up = 0 if again else 1
    times = warm_up + (_AGAIN if again else _REPETITIONS)
    measured = [
        seconds(partial(send, torch.zeros(size // 4, device=device)), device)
        for send in kinds.values()
        for size in sizes
        for _ in range(times)
    ]
    slowest = iter(messages.slowest(measured, device))
    hops, spent_s = {}, 0.0
    for kind in kinds:
        points = []
        for size in sizes:
            found = [next(slowest) for _ in range(times)]
            points.append((float(size), max(median(found[warm_up:]), 1e-9)))
            spent_s += sum(found)
        hops[kind] = fit_hop(points)
    return hops, spent_s


def _sizes(largest: int) -> tuple[int, ...]:
    """Whole fp32 numbers, the last at least twice the one before."""
    most = min(largest, _LARGEST) // 4 * 4
    return (*_SMALLER, most) if most >= 2 * _SMALLER[-1] else _SMALLER


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
