"""Several runs on one cluster: which of them gives slots to which. A pure function of what they say of themselves.

Every controller works it out for itself from the same claims, and acts on its own slots only; there is no coordinator.

The places that the runs hold, and those that are free, are dealt out on paper:

1. A run that has its least (`min_workers`) keeps it, whatever its priority: nothing that trains is ever stopped.
2. Then by priority, the highest first; within one priority
   a. runs below their least get all of it, the earliest first, or nothing where it does not fit: two runs that hold
      half of what they need each would wait for each other for ever;
   b. runs keep what they hold beyond;
   c. runs grow.

A run that holds more than its share releases the rest, and does not request what other runs wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.policy.capacity import fits

# How long a run asks for nothing after it was last asked to make room: slots given back take so long to find their run.
HOLD_S = 8.0


@dataclass(frozen=True)
class Claim:
    """What one run says of itself. Numbers of slots; `since` orders runs of one priority (seconds, wall clock).

    `held` counts every slot that has a place, also one that is being given back. `wanted` counts those that it has
    waited for so long that they cannot otherwise be had: nothing is free, and no autoscaler brings it.
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
    """How many slots the run may hold and ask for (None: as many as it likes), and why."""

    limit: int | None = None
    reason: str = ""


def decide(own: Claim, others: Sequence[Claim], free: int) -> Share:
    """`free` is how many slots of this run's shape have a free place now.

    Only runs whose slots fit into this run's places are looked at: to others it could give nothing.
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
    """Run -> slots, as the module says. What is dealt never exceeds what is held and free together."""
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
            # A run that cannot begin has no use for more.
            grown = min(left, max(0, claim.held + claim.wanted - dealt[claim.run]))
            if dealt[claim.run] >= claim.least:
                dealt[claim.run] += grown
                left -= grown
    return dealt


def _reason(own: Claim, first: Claim) -> str:
    needs = f"waits for {first.wanted} slot{'s' * (first.wanted != 1)}" if first.wanted else "is getting slots"
    if first.held < first.least:
        needs += f" and has {first.held} of the {first.least} that it needs"
    if first.priority != own.priority:
        return f"run {first.run} of priority {first.priority} (this one: {own.priority}) {needs}"
    return f"run {first.run} of the same priority {needs}"


@dataclass(frozen=True)
class Held:
    """A share that is kept for a while: what a run gives back is on its way to another, and must not be raced for."""

    share: Share = Share()
    until: float = 0.0

    def next(self, share: Share, now: float) -> Held:
        """`share` is what has just been decided. A limit outlives its reason by HOLD_S seconds."""
        if share.limit is not None:
            # The sentence with its numbers changes with every look; what matters is told once.
            same = share.limit == self.share.limit
            return replace(self, share=self.share if same else share, until=now + HOLD_S)
        return self if self.share.limit is not None and now < self.until else Held()
