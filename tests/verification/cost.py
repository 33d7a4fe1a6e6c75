"""The cost of the verification: seconds per GB of state on one core, by part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_BYTES = 256 << 20
_ROUNDS = 5


def seconds_per_gb() -> dict[str, tuple[float, float]]:
    """Part of the verification -> (median, spread) in processor seconds per GB that it reads, on one thread."""
    from elastic.checkpoint.digest import digest
    from elastic.core.sharding.layout import Chunk
    from elastic.engines.live_state import Master, Weight
    from elastic.training.state.verify_weights import fingerprint, unfaithful

    masters = torch.randn(_BYTES // 4)
    halves = masters.bfloat16()
    copy = halves.clone()
    chunk = Chunk("layer", 0, masters.numel(), "group0", 0)
    master = Master("group0", 0, masters, (chunk,), ("layer",), replicated=False)
    weight = Weight("layer", 0, halves, whole=True)
    parts: dict[str, tuple[Callable[[], object], int]] = {
        "content of fp32 tensors": (lambda: digest(masters, "exp_avg/layer"), _BYTES),
        "content of bf16 tensors": (lambda: digest(halves, "exp_avg/layer"), _BYTES // 2),
        "weights follow masters": (lambda: unfaithful([master], [weight]), _BYTES),
        "replicas equal": (lambda: fingerprint(copy), _BYTES // 2),
    }
    return {name: _measured(work, count) for name, (work, count) in parts.items()}


def _measured(work: Callable[[], object], count: int) -> tuple[float, float]:
    work()
    seconds = []
    for _ in range(_ROUNDS):
        began = time.thread_time()
        work()
        seconds.append((time.thread_time() - began) / count * 1e9)
    return statistics.median(seconds), max(seconds) - min(seconds)
