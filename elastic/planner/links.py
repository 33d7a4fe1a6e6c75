"""Time of one collective on one link class, and the fit of a link from measured sizes.

`t = (alpha^g + (beta n)^g)^(1/g)`: alpha is latency, beta seconds per byte, g the knee between them (1: the plain sum).
Steps and volumes are those of ring algorithms (nccl-tests, doc/PERFORMANCE.md; Patarasuk and Yuan, JPDC 2009): for n
bytes per rank an all-reduce moves 2 (p-1)/p n in 2 (p-1) steps, all-gather, reduce-scatter and all-to-all half of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.errors import UsageError
from elastic.planner.least_squares import Prior, fit_relative


@dataclass(frozen=True)
class Link:
    """`alpha_s` per step of an algorithm, `beta_s_per_byte` as one rank sees it."""

    alpha_s: float
    beta_s_per_byte: float
    knee: float = 1.0

    def seconds(self, steps: float, sent_bytes: float) -> float:
        latency, transfer = self.alpha_s * steps, self.beta_s_per_byte * sent_bytes
        if self.knee == 1.0:
            return latency + transfer
        return p_norm(latency, transfer, self.knee)


def p_norm(one: float, other: float, knee: float) -> float:
    """Between the sum (1) and the larger of both (infinity). Scaled, so that small times do not underflow."""
    largest = max(one, other)
    if largest <= 0:
        return 0.0
    return float(largest * ((one / largest) ** knee + (other / largest) ** knee) ** (1 / knee))


def wire_bytes(operation: str, ranks: int, size_bytes: float) -> float:
    """Bytes that one rank sends. `size_bytes` is the whole tensor: gathered, or before it is scattered."""
    if operation == "send":
        return size_bytes
    return _passes(operation) * (ranks - 1) / ranks * size_bytes


def steps(operation: str, ranks: int, ranks_per_node: int = 0) -> float:
    """Latencies that follow each other. All-reduce across nodes may take a tree (Sanders et al. 2009) instead."""
    if operation == "send":
        return 1
    ring = _passes(operation) * (ranks - 1)
    if operation != "all_reduce" or not ranks_per_node or ranks <= ranks_per_node:
        return ring
    return min(ring, 2 * (ranks_per_node - 1 + math.ceil(math.log2(ranks / ranks_per_node))))


def _passes(operation: str) -> int:
    return 2 if operation == "all_reduce" else 1


def fit_link(operation: str, ranks: int, measured: Sequence[tuple[int, float]], knee: float | None = None) -> Link:
    """The link that explains (bytes, seconds), in relative error. Three sizes are enough for alpha and beta.

    `knee` None fits it as well, which needs four. Raises UsageError for too few sizes or times that are not positive.
    """
    needed = 3 if knee is None else 2
    if len({size for size, _ in measured}) < needed or any(size <= 0 or time <= 0 for size, time in measured):
        raise UsageError(f"a link is fitted from {needed} or more sizes and times above zero, not {list(measured)}")
    smallest, largest = min(measured), max(measured)
    start = Link(
        smallest[1] / max(1.0, steps(operation, ranks)), largest[1] / wire_bytes(operation, ranks, largest[0]), 1.0
    )
    # Wide priors: they decide only what the sizes leave open.
    priors = [Prior(start.alpha_s, 3.0), Prior(start.beta_s_per_byte, 3.0)]
    if knee is None:
        priors.append(Prior(1.0, 0.5))

    def predict(constants: Sequence[float]) -> list[float]:
        link = Link(constants[0], constants[1], constants[2] if knee is None else knee)
        return [link.seconds(steps(operation, ranks), wire_bytes(operation, ranks, size)) for size, _ in measured]

    found = fit_relative(predict, [time for _, time in measured], priors, noise=0.02)
    return Link(found[0], found[1], found[2] if knee is None else knee)
