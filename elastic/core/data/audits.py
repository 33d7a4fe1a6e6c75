"""Audits: ranks that compute wrong numbers are found, because another rank computes the same micro-batch once more.

In the last pass of an audited step every rank repeats a micro-batch of another one. Its gradient is compared and thrown
away. Where two differ, a third rank computes it in one more pass, and the majority decides, before the weights change.

In the first step of a generation every rank also repeats a micro-batch of its own, which measures how reproducible the
computation is: bitwise on a CPU; on a GPU some kernels add in another order each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

# Repetitions on one rank that differ by more than this, relative to the gradient's norm, are not rounding.
MOST_ROUNDING = 1e-3
# A measured difference is that of one repetition; others may be larger.
MARGIN = 32.0
# On a GPU each process chooses its kernels by itself, some by timing them, and repeats its own choice bit for bit: two
# healthy ranks may differ by the rounding of the coarsest type that they compute in, bf16.
_DEVICE_ROUNDING = 2.0**-7


class Round(Enum):
    """Whose micro-batch every rank repeats in a pass."""

    OWN = "own"
    OTHER = "other"
    # Where ranks differ: so that each of those micro-batches is computed by one more rank.
    THIRD = "third"


@dataclass(frozen=True)
class AuditPlan:
    """Which steps of a generation are audited, and who repeats whose micro-batch. Steps count from 0: `first_step` is
    the generation's first. `turn` varies the pairs between generations."""

    every_steps: int
    first_step: int
    turn: int = 0

    def rounds(self, step: int, world_size: int) -> tuple[Round, ...]:
        """The additional passes of a step. A single rank has nobody to be compared with."""
        if world_size < 2:
            return ()
        measured = (Round.OWN,) if step == self.first_step else ()
        return (*measured, Round.OTHER) if (step + 1) % self.every_steps == 0 else measured

    def passes_between(self, first: int, end: int, world_size: int) -> int:
        """How many passes are added to the steps [first, end)."""
        if world_size < 2 or end <= first:
            return 0
        return end // self.every_steps - first // self.every_steps + (first <= self.first_step < end)

    def number(self, step: int) -> int:
        """The number of the audit, by which the micro-batches take turns."""
        return (step + 1) // self.every_steps

    def distance(self, step: int, round_: Round, world_size: int) -> int:
        """How many ranks up the one is whose micro-batch is repeated."""
        if round_ is Round.OWN or (round_ is Round.THIRD and world_size == 2):
            # Of two ranks none is a third one: each computes its own once more.
            return 0
        return 1 + (self.number(step) + self.turn + (round_ is Round.THIRD)) % (world_size - 1)


@dataclass(frozen=True)
class Computation:
    """What rank `rank` found for one micro-batch: (loss, then the sum and the squared norm of each part of the
    gradient). `kind` stands for the kind of its device, and for how many forward passes the script made."""

    rank: int
    values: tuple[float, ...]
    kind: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """`wrong`: the ranks that are outvoted. `undecided`: ranks one of which is wrong, without a majority. `evidence`
    is one sentence; "" where all agree. `part`: the number of the part of the gradient that differs most."""

    wrong: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()
    evidence: str = ""
    part: int | None = None


def difference(one: Computation, other: Computation) -> tuple[float, int | None]:
    """(how much they differ relative to the size of what is compared, in which part of the gradient: None in the loss).

    0.0 only where all values are equal; values that are non-finite in both are. inf where only one is non-finite.
    """
    worst, where = _relative(one.values[0], other.values[0], max(abs(one.values[0]), abs(other.values[0]))), None
    for part, at in enumerate(range(1, len(one.values), 2)):
        (sum_, square), (other_sum, other_square) = one.values[at : at + 2], other.values[at : at + 2]
        largest = max(abs(square), abs(other_square))
        found = max(_relative(square, other_square, largest), _relative(sum_, other_sum, math.sqrt(largest)))
        if found > worst:
            worst, where = found, part
    return worst, where


def tolerated(measured: float, on_gpu: bool) -> float:
    """The difference between two ranks that counts as none, from the largest between two passes of one rank."""
    return max(min(MARGIN * measured, MOST_ROUNDING), _DEVICE_ROUNDING if on_gpu else 0.0)


def comparable(own: Computation, other: Computation) -> bool:
    """Must the two agree? Other kinds of device round in other ways, and each forward pass has its random stream."""
    return own.kind == other.kind


def disputed(found: Mapping[int, Sequence[Computation]], tolerance: float) -> tuple[int, ...]:
    """The ranks whose micro-batch was not found alike by all that are `comparable`; `found[rank]` begins with the
    rank's own computation."""
    return tuple(
        rank
        for rank, (own, *others) in found.items()
        if any(comparable(own, other) and difference(own, other)[0] > tolerance for other in others)
    )


def not_reproducible(disputes: int, world_size: int, measuring: bool) -> bool:
    """Do so many ranks differ that not a rank is at fault but the computation: a loss that depends on more than the
    batch, the weights and the random stream? One faulty rank is in two disputes: its own and its neighbour's."""
    return disputes * 2 > world_size if measuring else disputes > max(2, world_size // 2)


def vote(rank: int, computed: Sequence[Computation], tolerance: float) -> Verdict:
    """Who is wrong about the micro-batch of `rank`: a rank that contradicts itself, else whoever the majority of the
    ranks does not agree with."""
    who = sorted({one.rank for one in computed})
    apart, part = max((difference(one, other) for one in computed for other in computed), key=lambda found: found[0])
    agreeing = [{other.rank for other in computed if difference(one, other)[0] <= tolerance} for one in computed]
    largest = max(agreeing, key=len)
    told = f"{listed_ranks(who)} computed the micro-batch of rank {rank}, and differ by {apart:.2g}"
    torn = tuple(
        name
        for name in who
        if any(
            difference(one, other)[0] > tolerance for one in computed for other in computed
            if one.rank == other.rank == name
        )
    )  # fmt: skip
    if torn:
        return Verdict(torn, (), f"{told}; {listed_ranks(torn)} did so between two passes of its own", part)
    if len(largest) * 2 <= len(who):
        return Verdict((), tuple(who), f"{told}; no majority agrees", part)
    wrong = tuple(name for name in who if name not in largest)
    return Verdict(wrong, (), f"{told}; {listed_ranks(sorted(largest))} agree", part)


def refused_audit(sp: int, streams: bool, tp: int = 1, ep: int = 1, pp: int = 1) -> str | None:
    """Why the job cannot be audited, as a sentence."""
    if sp > 1:
        return f"audit: with mesh: {{sp: {sp}}} a rank computes its part of a sequence only, which no other can repeat"
    if tp > 1:
        return (
            f"audit: with mesh: {{tp: {tp}}} a rank computes its slices of the layers only, which no other can repeat"
        )
    if ep > 1:
        return f"audit: with mesh: {{ep: {ep}}} a rank has some experts only, and cannot repeat another's micro-batch"
    if pp > 1:
        return f"audit: with mesh: {{pp: {pp}}} a rank computes its layers only, which no other can repeat"
    if streams:
        return (
            "audit: a rank cannot read the micro-batch of another one from a stream; use a map-style dataset, or leave "
            "audit out"
        )
    return None


def _relative(one: float, other: float, size: float) -> float:
    if one == other or (not math.isfinite(one) and not math.isfinite(other)):
        return 0.0
    apart = abs(one - other)
    if not math.isfinite(apart):
        return math.inf
    return apart / size if size > 0.0 and math.isfinite(size) else math.inf


def listed_ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"ranks {names}" if len(ranks) > 1 else f"rank {names}"
