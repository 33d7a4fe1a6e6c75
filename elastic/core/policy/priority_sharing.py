"""Sharing of one cluster between runs: which run releases slots for which. A pure function of the runs' claims.

Every controller evaluates it on the same claims and acts on its own slots only; there is no coordinator.

The slots that the runs hold and the free ones are assigned in this order:

1. A run that holds its minimum (`min_workers`) keeps it, whatever its priority: a run that trains is never stopped.
2. Then by priority, the highest first; within one priority
   a. runs below their minimum get all of it, the earliest first, or nothing if it does not fit: two runs with half of
      their minimum each would deadlock;
   b. runs keep what they hold beyond their minimum;
   c. runs grow.

A run that holds more than its share releases the surplus, and does not request slots that other runs wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.policy.capacity import fits
from elastic.core.wording import plural

# A run requests nothing for this long after it last had to make room: released slots take that long to be placed.
HOLD_S = 8.0


@dataclass(frozen=True)
class Claim:
    """The claim of one run, in slots; `since` orders runs of one priority (seconds, wall clock).

    `held` counts every placed slot, also one that is being released. `wanted` counts the slots that the run has waited
    for longer than `share_after_s`: none is free, and no autoscaler adds one.
    """

    run: str
    priority: int
    since: float
    slot: Mapping[str, float]
    least: int
    held: int
    wanted: int

    @property
    def order(self) -> tuple[float, float, str]:
        return (-self.priority, self.since, self.run)


@dataclass(frozen=True)
class Share:
    """How many slots the run may hold and request (None: no limit), and why."""

    limit: int | None = None
    reason: str = ""


def decide(own: Claim, others: Sequence[Claim], free: int) -> Share:
    """`free` is how many slots of this run's shape are free now.

    Only runs whose slots fit into this run's slots are considered; it could release nothing useful to others.
    """
    pool = [own, *(other for other in others if fits(other.slot, own.slot))]
    dealt = deal(pool, free)
    short = [claim for claim in pool if dealt[claim.run] > claim.held]
    if own in short:
        return Share()
    # Do not compete with a higher-priority run for the next free slot.
    using = [claim for claim in pool if claim.wanted and dealt[claim.run] >= claim.least]
    ahead = [claim for claim in using if claim.priority > own.priority]
    first = min([*short, *ahead], key=lambda claim: claim.order, default=None)
    if first is None:
        return Share()
    return Share(dealt[own.run], _reason(own, first))


def deal(claims: Sequence[Claim], free: int) -> dict[str, int]:
    """Run -> slots, by the rules of this module. The sum never exceeds the slots that are held or free."""
    left = free + sum(claim.held for claim in claims)
    dealt = {claim.run: claim.least if claim.held >= claim.least else 0 for claim in claims}
    left -= sum(dealt.values())
    for priority in sorted({claim.priority for claim in claims}, reverse=True):
        level = sorted((claim for claim in claims if claim.priority == priority), key=lambda claim: claim.order)
        for claim in level:
            if claim.held < claim.least and claim.held + claim.wanted >= claim.least <= left:
                dealt[claim.run] = claim.least
                left -= claim.least
        for claim in level:
            kept = min(left, max(0, claim.held - dealt[claim.run]))
            dealt[claim.run] += kept
            left -= kept
        for claim in level:
            # A run that cannot start has no use for more.
            grown = min(left, max(0, claim.held + claim.wanted - dealt[claim.run]))
            if dealt[claim.run] >= claim.least:
                dealt[claim.run] += grown
                left -= grown
    return dealt


def _reason(own: Claim, first: Claim) -> str:
    needs = f"waits for {plural(first.wanted, 'slot')}" if first.wanted else "is getting slots"
    if first.held < first.least:
        needs += f" and has {first.held} of the {first.least} that it needs"
    if first.priority != own.priority:
        return f"run {first.run} of priority {first.priority} (this one: {own.priority}) {needs}"
    return f"run {first.run} of the same priority {needs}"


@dataclass(frozen=True)
class Held:
    """A share that is kept for a while, so that the run does not compete for the slots that it has just released."""

    share: Share = Share()
    until: float = 0.0

    def next(self, share: Share, now: float) -> Held:
        """`share` is the latest decision. A limit outlives its reason by HOLD_S seconds."""
        if share.limit is not None:
            # The numbers in the reason change with every look; report a limit once.
            same = share.limit == self.share.limit
            return replace(self, share=self.share if same else share, until=now + HOLD_S)
        return self if self.share.limit is not None and now < self.until else Held()
