"""What members do that only exchange."""

from __future__ import annotations

import random
from typing import Any

import crew
import torch
import torch.distributed as dist

import elastic


def for_ever(config: dict[str, Any]) -> None:
    """`config["numbers"]` are exchanged again and again, at times that differ among the ranks."""
    given = torch.ones(config["numbers"])
    taken = torch.zeros_like(given)
    work, own = torch.ones(64, 64), random.Random(elastic.get_context().rank)
    dist.all_to_all_single(taken, given)
    crew.point("there")
    while True:
        dist.all_to_all_single(taken, given)
        for _ in range(own.randrange(4)):
            work @ work
