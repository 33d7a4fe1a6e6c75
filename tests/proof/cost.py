"""What the proof costs: the seconds per GB of state that one core needs, by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_BYTES = 256 << 20
_ROUNDS = 5


def seconds_per_gb() -> dict[str, tuple[float, float]]:
    """Part of the proof -> (median, spread) in seconds per GB that it reads. Single-threaded."""
    from elastic.checkpoint.digest import digest
    from elastic.training.state.weights import fingerprint

    masters = torch.randn(_BYTES // 4)
    halves = masters.bfloat16()
    copy = halves.clone()
    parts: dict[str, tuple[Callable[[], object], int]] = {
        "content of fp32 tensors": (lambda: digest(masters, "exp_avg/layer"), _BYTES),
        "content of bf16 tensors": (lambda: digest(halves, "exp_avg/layer"), _BYTES // 2),
        "weights follow masters": (lambda: torch.equal(masters.bfloat16(), halves), _BYTES),
        "replicas equal": (lambda: fingerprint(copy), _BYTES // 2),
    }
    return {name: _measured(work, count) for name, (work, count) in parts.items()}


def _measured(work: Callable[[], object], count: int) -> tuple[float, float]:
    work()
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append((time.perf_counter() - began) / count * 1e9)
    return statistics.median(seconds), max(seconds) - min(seconds)
