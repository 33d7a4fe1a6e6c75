"""What a message takes, by latency and bandwidth, and which ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

# Kinds of messages: between two ranks of one node, and of two.
NODE, NODES = "node", "nodes"


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
