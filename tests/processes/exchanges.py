"""What members do that only exchange."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import crew
import torch
import torch.distributed as dist

import elastic


def for_ever(config: dict[str, Any]) -> None:
    """`config["numbers"]` are exchanged again and again, at times that differ among the ranks, by `config["by"]`."""
    given = torch.ones(config["numbers"])
    taken = torch.zeros_like(given)
    work, own = torch.ones(64, 64), random.Random(elastic.get_context().rank)
    exchange = _BY[config["by"]]
    exchange(taken, given)
    crew.point("there")
    while True:
        exchange(taken, given)
        for _ in range(own.randrange(4)):
            work @ work


def _passed_on(taken: torch.Tensor, given: torch.Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(given, (rank + 1) % size)
    dist.recv(taken, (rank - 1) % size)
    assert sent is not None
    sent.wait()


def _scattered(taken: torch.Tensor, given: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(taken[: len(taken) // dist.get_world_size()], given)


_BY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "all-to-all": dist.all_to_all_single,
    "messages": _passed_on,
    "reduce-scatter": _scattered,
}
