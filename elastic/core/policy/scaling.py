"""When to start and when to grow: a policy fed facts, with no I/O and no clock.

A policy is a `ScalingPolicy`; `EagerScaling` is the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elastic.core.settings import ScalingSettings


@dataclass(frozen=True)
class ScalingFacts:
    """What a policy may look at. `idle` workers could join now; `arriving` ones are being started."""

    settings: ScalingSettings
    now: float
    idle: int
    arriving: int
    pending_slots: int
    members: int = 0
    waiting_since: float = 0.0
    first_start: bool = False
    storage_failing: bool = False


@dataclass(frozen=True)
class Verdict:
    """`go` with `size` members, or not, and why. `again_at` is when the answer may change by time alone."""

    go: bool
    reason: str
    size: int = 0
    again_at: float | None = None


class ScalingPolicy(Protocol):
    def start(self, facts: ScalingFacts) -> Verdict:
        """Asked while no generation runs: start one?"""
        ...

    def grow(self, facts: ScalingFacts) -> Verdict:
        """Asked while a generation trains: end it as planned to let more workers in?"""
        ...


class EagerScaling:
    """Start as soon as `min_workers` are there, go on at once after a loss, grow when no further arrival is near."""

    def start(self, facts: ScalingFacts) -> Verdict:
        low, high = facts.settings.min_workers, facts.settings.max_workers
        if facts.idle < low:
            missing = low - facts.idle
            return Verdict(
                False,
                f"waiting for {missing} more worker{'s' * (missing > 1)}: {facts.idle} of at least {low} ready, "
                f"{facts.arriving} starting, {facts.pending_slots} slots pending",
            )
        gather_until = facts.waiting_since + facts.settings.gather_s
        more = facts.arriving + facts.pending_slots
        if facts.first_start and facts.idle < high and more and (facts.arriving or facts.now < gather_until):
            return Verdict(
                False,
                f"{facts.idle} of {high} workers ready; {facts.arriving} more are starting",
                again_at=gather_until,
            )
        size = min(facts.idle, high)
        return Verdict(True, f"{facts.idle} workers ready (at least {low}, at most {high})", size)

    def grow(self, facts: ScalingFacts) -> Verdict:
        size = min(facts.members + facts.idle, facts.settings.max_workers)
        if size <= facts.members:
            return Verdict(False, "no worker to add")
        if facts.storage_failing:
            return Verdict(False, f"{facts.idle} new workers wait: growing needs a checkpoint and storage is failing")
        if facts.arriving and size < facts.settings.max_workers:
            return Verdict(False, f"{facts.idle} new workers ready; {facts.arriving} more are starting")
        return Verdict(True, f"{facts.idle} new workers are ready: {facts.members} -> {size}", size)
