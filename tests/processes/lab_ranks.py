"""What ranks of the lab's all-reduce do in a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lab import allreduce

Outcome = dict[str, Any]


def compare(wire: allreduce.Wire, per_node: Sequence[int], lengths: Sequence[int]) -> list[Outcome]:
    """Each algorithm, on whole numbers, whose sums are exact in any order: was it torch's own, and what was sent?"""
    algorithms: dict[str, allreduce.Reduce] = {"ring": allreduce.ring, "tree": allreduce.tree}
    for size in per_node:
        algorithms[f"hierarchical {size}"] = lambda tensor, wire, size=size: allreduce.hierarchical(tensor, wire, size)
    found = []
    for length in lengths:
        mine = torch.randint(-1000, 1000, (length,), generator=torch.Generator().manual_seed(wire.rank)).float()
        expected = mine.clone()
        dist.all_reduce(expected)
        for name, reduce in algorithms.items():
            tensor, before = mine.clone(), (wire.messages, wire.bytes)
            reduce(tensor, wire)
            sent = wire.messages - before[0], wire.bytes - before[1]
            found.append({"name": name, "length": length, "equal": torch.equal(tensor, expected), "sent": sent})
    return found


def one_fails(wire: allreduce.Wire) -> None:
    if wire.rank == 1:
        raise ValueError("rank 1 has a reason")


def refused(wire: allreduce.Wire) -> str:
    try:
        allreduce.hierarchical(torch.ones(4), wire, 2)
    except ValueError as error:
        return str(error)
    return ""


def few_times(wire: allreduce.Wire) -> dict[str, dict[int, list[float]]]:
    return allreduce.times(wire, 2, [4096], 2)
