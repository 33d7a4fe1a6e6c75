"""Scaling by expected cost: what a run has measured decides whether it continues smaller, waits, or takes a spare.

Costs are lost node-seconds: nodes of the wanted size times seconds of full speed that an option loses. What every
option pays alike (detection, the end of the failed generation, one start) is in none of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.mesh import whole_cells
from elastic.core.policy.measured import Measured
from elastic.core.policy.scaling import EagerScaling, Option, ScalingFacts, Verdict

# A wait allows a replacement so many times what an earlier one took: a few measurements have not seen the slowest.
_SLACK = 2.0


class MeasuredScaling:
    """As "eager" where nothing was measured yet, for the first start, and where it costs less than the alternative."""

    def start(self, facts: ScalingFacts) -> Verdict:
        default = EagerScaling().start(facts)
        if not default.go or facts.wanted <= 0:
            return default
        size = default.size
        smaller = size if size < facts.wanted else whole_cells(facts.wanted - facts.lost, *facts.cells)
        loss = _loss(facts, smaller)
        if loss is None or (size >= facts.wanted and not facts.settings.spare_slots):
            return default
        shrink, wait, limit_s = loss.options()
        if size >= facts.wanted:
            spare = Option("spare", size, 0.0, 0.0)
            known = (spare, shrink, wait) if smaller >= facts.settings.min_workers else (spare, wait)
            why = f"{default.reason}; a spare, or a replacement, has the place of what was lost"
            return replace(default, reason=why, options=known, chosen="spare")
        return _wait_or_shrink(facts, default, shrink, wait, limit_s)

    def grow(self, facts: ScalingFacts) -> Verdict:
        default = EagerScaling().grow(facts)
        if not default.go:
            return default
        options = _growth(facts, default.size)
        if not options or options[0].lost_node_s <= options[1].lost_node_s:
            return replace(default, options=options, chosen="grow" if options else "")
        grow, stay = options
        why = f"costs {grow.lost_node_s:.0f} node-seconds and would save {stay.lost_node_s:.0f}"
        return Verdict(
            False,
            f"no growth {facts.members} -> {default.size}: it {why}",
            default.size,
            options=options,
            chosen="stay",
        )


def _wait_or_shrink(facts: ScalingFacts, default: Verdict, shrink: Option, wait: Option, limit_s: float) -> Verdict:
    options, until = (shrink, wait), facts.waiting_since + limit_s
    if wait.lost_node_s >= shrink.lost_node_s:
        why = f"continuing with {shrink.world_size} costs less than waiting for {wait.world_size}"
    elif facts.now < until:
        reason = (
            f"waiting {limit_s:.1f} s at most for {wait.world_size - shrink.world_size} more: a replacement is "
            f"expected in {wait.after_s:.1f} s, which costs less than continuing with {shrink.world_size}"
        )
        return Verdict(False, reason, again_at=until, options=options, chosen="wait")
    else:
        why = f"no replacement has come within {limit_s:.1f} s"
    return replace(default, reason=f"{default.reason}; {why}", options=options, chosen="shrink")


@dataclass(frozen=True)
class _Loss:
    """A run that has lost nodes. `arrivals`: (seconds from now, probability) until it has the wanted size again, in
    order, infinite where nothing comes. `speed` of the smaller run, 1 at the wanted size; it is worth something for
    `horizon_s`: until the run's end or the next failure. `failures_per_s` of the smaller run."""

    facts: ScalingFacts
    smaller: int
    arrivals: tuple[tuple[float, float], ...]
    speed: float
    horizon_s: float
    failures_per_s: float
    resize_s: float
    recovery_s: float

    def options(self) -> tuple[Option, Option, float]:
        """To continue smaller, to wait, and how long to wait at most.

        The longest wait is the best one of those that earlier replacements suggest, and no longer than it takes to
        lose a resize and a recovery by it: more than that it never costs, whatever comes.
        """
        nodes, wanted = _nodes(self.facts, self.facts.wanted), self.facts.wanted
        most_s = (self.resize_s + self.recovery_s) / self.speed
        limits = {min(_SLACK * after_s, most_s) for after_s, _ in self.arrivals if after_s < math.inf}
        limit_s = min(sorted(limits, reverse=True), key=self.lost_s)
        coming = [(after_s, share) for after_s, share in self.arrivals if after_s < math.inf]
        expected_s = sum(after_s * share for after_s, share in coming) / sum(share for _, share in coming)
        shrink = Option("shrink", self.smaller, 0.0, nodes * self.lost_s(0.0))
        return shrink, Option("wait", wanted, expected_s, nodes * self.lost_s(limit_s)), limit_s

    def lost_s(self, limit_s: float) -> float:
        """Expected loss, in seconds of full speed, of waiting for `limit_s` and continuing smaller after it."""
        return sum(
            share * (after_s if after_s <= limit_s else limit_s + self._smaller_for(after_s - limit_s))
            for after_s, share in self.arrivals
        )

    def _smaller_for(self, seconds: float) -> float:
        """To train smaller for so long, with the failures of that time, and then to grow."""
        time_s = min(seconds, self.horizon_s)
        failing = 1 - math.exp(-self.failures_per_s * time_s)
        grow_s = self.resize_s if seconds < self.horizon_s else 0.0
        return (1 - self.speed) * time_s + failing * self.recovery_s + grow_s


def _loss(facts: ScalingFacts, smaller: int) -> _Loss | None:
    """None where a fact is missing, or nothing was asked for that could come."""
    known = facts.measured
    resize_s, recovery_s = known.typical_resize_s, known.typical_recovery_s
    size = min(facts.idle, facts.wanted)
    slots = _nodes(facts, facts.wanted) - _nodes(facts, size if size < facts.wanted else max(1, smaller))
    arrivals = _arrivals(facts, max(1, slots))
    coming = facts.pending_slots + facts.arriving or facts.settings.spare_slots
    if resize_s is None or recovery_s is None or not arrivals or not coming:
        return None
    at = max(1, smaller)
    rate = known.losses_per_node_s * _nodes(facts, at)
    return _Loss(
        facts, smaller, arrivals, known.speed(at, facts.wanted), _horizon_s(facts, at, rate), rate, resize_s, recovery_s
    )


def _arrivals(facts: ScalingFacts, slots: int) -> tuple[tuple[float, float], ...]:
    """When the last of so many replacements comes, by those that came before and those that never did."""
    over_s = facts.waiting_since - facts.lost_at
    came = sorted(seconds - over_s for seconds in facts.measured.replacement_s if seconds > over_s)
    if not came:
        return ()
    outcomes = [*came, *[math.inf] * facts.unreplaced]
    count = len(outcomes)
    # The largest of `slots` independent ones.
    shares = [((place + 1) / count) ** slots - (place / count) ** slots for place in range(count)]
    return tuple(zip(outcomes, shares, strict=True))


def _growth(facts: ScalingFacts, size: int) -> tuple[Option, ...]:
    """To grow now, and to stay; empty where a fact is missing."""
    known, resize_s = facts.measured, facts.measured.typical_resize_s
    nodes = _nodes(facts, size)
    horizon_s = _horizon_s(facts, facts.members, known.losses_per_node_s * nodes)
    if resize_s is None or horizon_s == math.inf:
        return ()
    lost_s = (1 - known.speed(facts.members, size)) * horizon_s
    return Option("grow", size, 0.0, nodes * resize_s), Option("stay", facts.members, 0.0, nodes * lost_s)


def _horizon_s(facts: ScalingFacts, size: int, failures_per_s: float) -> float:
    """Until the run's end at this size, or the next failure: whatever follows is decided anew."""
    known: Measured = facts.measured
    step_s = known.step_s.get(size)
    end_s = math.inf if facts.steps_left is None or step_s is None else facts.steps_left * step_s
    return min(end_s, 1 / failures_per_s if failures_per_s > 0 and known.losses else math.inf)


def _nodes(facts: ScalingFacts, workers: int) -> int:
    return -(-workers // facts.settings.workers_per_slot)


def table(verdict: Verdict, measured: Measured, price: float | None) -> dict[str, Any]:
    """For the journal: what each option was expected to cost, and the facts behind it; empty where nothing was
    compared. `price` of a node-hour."""
    if not verdict.options:
        return {}
    rows = [
        {
            "option": one.name,
            "world_size": one.world_size,
            "after_s": round(one.after_s, 3),
            "lost_node_s": round(one.lost_node_s, 3),
            **({"price": round(one.lost_node_s / 3600 * price, 4)} if price is not None else {}),
        }
        for one in verdict.options
    ]
    low, high = measured.losses_per_node_s_interval
    facts = {
        "resize_s": measured.typical_resize_s,
        "recovery_s": measured.typical_recovery_s,
        "replacement_s": list(measured.replacement_s),
        "step_s": {str(size): step_s for size, step_s in measured.step_s.items()},
        "losses_per_node_hour": 3600 * measured.losses_per_node_s,
        "losses_per_node_hour_interval": [3600 * low, 3600 * high if high < math.inf else None],
    }
    return {"chosen": verdict.chosen, "options": rows, "facts": facts}
