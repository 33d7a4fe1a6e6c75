"""What one reduction of a gradient costs by each exact strategy, from the latency and the bandwidth of measured hops.

p ranks on N nodes of g each, n bytes. Ring: 2 (p-1) messages of n/p (Patarasuk and Yuan, JPDC 2009). Tree: binomial, a
reduction and a broadcast of n (Thakur, Rabenseifner and Gropp, IJHPCA 2005). Hierarchical: a reduce-scatter within each
node, a ring over the nodes for each part, an all-gather within. A collective waits for its slowest message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

# Kinds of messages, each measured as the strategies send it: all ranks to the next one within their node; to the same
# place of the next node, all places at once; to the next rank of all. And the backend's own all-reduce, as a whole.
NODE, NODES, RANKS, BACKEND = "node", "nodes", "ranks", "all_reduce"


@dataclass(frozen=True)
class Hop:
    """Of one kind of message: `alpha_s` + `beta_s_per_byte` * bytes."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes


@dataclass(frozen=True)
class Islands:
    """The ranks of one group in parts of equal size, each within one node; `places[i]` are the ranks of part i."""

    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, nodes: Sequence[int]) -> Islands:
        """`nodes[rank]` is the rank's node. Where nodes have unlike numbers of ranks, the parts are as large as their
        greatest common divisor."""
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            by_node.setdefault(node, []).append(rank)
        width = gcd(*(len(ranks) for ranks in by_node.values()))
        return cls(
            tuple(
                tuple(ranks[begin : begin + width])
                for ranks in by_node.values()
                for begin in range(0, len(ranks), width)
            )
        )

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def width(self) -> int:
        return len(self.places[0])

    @property
    def ranks(self) -> int:
        return self.count * self.width

    def find(self, rank: int) -> tuple[int, int]:
        """(island, place in it) of a rank."""
        return next((number, own.index(rank)) for number, own in enumerate(self.places) if rank in own)

    def lane(self, rank: int) -> tuple[int, ...]:
        """The ranks at the same place of every island."""
        place = self.find(rank)[1]
        return tuple(own[place] for own in self.places)


def fit_hop(measured: Sequence[tuple[float, float]]) -> Hop:
    """The line through (bytes, seconds) with the least squares of *relative* errors; neither part is below zero.

    Without weights the largest message would decide alone (H100 nccl-tests: up to 59 % off).
    """
    # Both sides divided by the seconds: 1 = alpha / t + beta * n / t.
    rows = [(1.0 / seconds, nbytes / seconds) for nbytes, seconds in measured]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    alpha, beta = ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant) if determinant else (a / aa, 0.0)
    if alpha < 0.0:
        return Hop(0.0, b / bb)
    return Hop(alpha, beta) if beta >= 0.0 else Hop(a / aa, 0.0)


def exact_costs(islands: Islands, buckets: Sequence[int], hops: Mapping[str, Hop]) -> dict[str, float]:
    """Strategy -> seconds of a step whose gradients lie in `buckets` (bytes). `hops` has the kinds that exist."""
    costs = {"all_reduce": sum(hops[BACKEND].seconds(size) for size in buckets)}
    if islands.ranks > 1:
        costs["ring"] = sum(ring_seconds(islands.ranks, size, hops[RANKS]) for size in buckets)
        costs["tree"] = sum(_tree_seconds(islands, size, hops) for size in buckets)
    if islands.width > 1 and islands.count > 1:
        costs["hierarchical"] = sum(
            ring_seconds(islands.width, size, hops[NODE])
            + ring_seconds(islands.count, size / islands.width, hops[NODES])
            for size in buckets
        )
    return costs


def feedback_costs(
    islands: Islands, total: float, part: float, sent: Mapping[str, Sequence[float]], hops: Mapping[str, Hop]
) -> dict[str, float]:
    """Strategy -> seconds of a step with error feedback: `total` bytes of gradients, the largest `part` of which goes
    between islands. `sent`: bytes of each message of a strategy, gathered from all islands; those of "power_sgd" are
    added up instead."""
    inside = ring_seconds(islands.width, total, hops.get(NODE, hops[RANKS])) if islands.width > 1 else 0.0
    count, hop = islands.count, hops.get(NODES, hops[RANKS])
    costs = {"hierarchical": inside + ring_seconds(count, part, hop)}
    for name, messages in sent.items():
        if name == "power_sgd":
            costs[name] = inside + sum(ring_seconds(count, size, hop) for size in messages)
        else:
            costs[name] = inside + sum((count - 1) * hop.seconds(size) for size in messages)
    return costs


def ring_seconds(ranks: int, nbytes: float, hop: Hop) -> float:
    return 2 * (ranks - 1) * hop.seconds(nbytes / ranks)


def _tree_seconds(islands: Islands, nbytes: float, hops: Mapping[str, Hop]) -> float:
    """Twice the levels of the tree, each as slow as the slowest kind of message in it."""
    home = {rank: number for number, own in enumerate(islands.places) for rank in own}
    total, distance = 0.0, 1
    while distance < islands.ranks:
        pairs = [(rank, rank + distance) for rank in range(0, islands.ranks - distance, 2 * distance)]
        crosses = any(home[low] != home[high] for low, high in pairs)
        total += 2 * (hops[RANKS] if crosses else hops.get(NODE, hops[RANKS])).seconds(nbytes)
        distance *= 2
    return total
