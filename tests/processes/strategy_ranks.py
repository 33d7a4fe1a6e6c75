"""What ranks do in tests of compressors, on real messages."""

from __future__ import annotations

from typing import Any

import torch
from lab.allreduce import Wire

from elastic.comm.strategies.lossy import Compressor, Int8, Lane, PowerSgd, TopK, Whole

SHAPES = {"weight": (40, 30), "bias": (40,), "kernel": (20, 3, 3), "small": (2, 2)}
NUMEL = 40 * 30 + 40 + 180 + 4


def compressors() -> dict[str, Compressor]:
    return {"hierarchical": Whole(), "int8": Int8(), "top_k": TopK(0.05), "power_sgd": PowerSgd(2, SHAPES)}


def part_of(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def compress(wire: Wire, bad: int | None = None) -> dict[str, Any]:
    """By name: (what all have sent, what this rank has, bytes that this rank put on the wire). `bad`: a rank with one
    element that is not a number."""
    lane, found = Lane(tuple(range(wire.ranks)), wire), {}
    for name, compressor in compressors().items():
        part, before = part_of(wire.rank), wire.bytes
        if wire.rank == bad:
            part[7] = float("nan")
        summed, sent = compressor.sum(part, lane)
        found[name] = (summed.tolist(), sent.tolist(), wire.bytes - before)
    return found


def repeat_one_matrix(wire: Wire) -> list[float]:
    """Every rank has the same matrix of rank 2 in each step: what PowerSGD leaves out, relative."""
    lane, compressor = Lane(tuple(range(wire.ranks)), wire), PowerSgd(2, {"weight": (40, 30)})
    chance = torch.Generator().manual_seed(3)
    matrix = torch.randn(40, 2, generator=chance) @ torch.randn(2, 30, generator=chance)
    left = []
    for _ in range(3):
        summed, _ = compressor.sum(matrix.reshape(-1), lane)
        compressor.bases |= compressor.found
        left.append(float((summed.view(40, 30) - wire.ranks * matrix).norm() / matrix.norm()))
    return left
