"""When to start and when to grow: policies that are given facts, without I/O and without a clock.

A policy is a `ScalingPolicy`, registered by name in `scaling_policies.POLICIES`. `ScalingFacts` is the only place where
further facts reach a policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from elastic.core.mesh import whole_cells
from elastic.core.policy.measured import Measured
from elastic.core.settings import ScalingSettings
from elastic.core.wording import plural, verb


@dataclass(frozen=True)
class ScalingFacts:
    """What a policy may look at. `idle` workers could join now; `arriving` workers are being started.

    Sizes are multiples of one of `cells`, as are the settings' `min_workers` and `max_workers`.
    `now`, `waiting_since` and `lost_at` are seconds; `first_start` is True until the run's first generation has begun.
    After a loss of `lost` members, noticed at `lost_at`, the run wants `wanted` again (0: nothing was lost);
    `unreplaced` are nodes whose loss lies further back and that were never replaced. `steps_left` until the run's end,
    where that is known.
    """

    settings: ScalingSettings
    now: float
    idle: int
    arriving: int
    pending_slots: int
    members: int = 0
    waiting_since: float = 0.0
    first_start: bool = False
    storage_failing: bool = False
    cells: tuple[int, ...] = (1,)
    measured: Measured = field(default_factory=Measured)
    wanted: int = 0
    lost: int = 0
    lost_at: float = 0.0
    unreplaced: int = 0
    steps_left: float | None = None

    @property
    def grown(self) -> int:
        """The members that there could be now."""
        return whole_cells(min(self.members + self.idle, self.settings.max_workers), *self.cells)


@dataclass(frozen=True)
class Option:
    """One thing that could be done: train with `world_size` workers in `after_s` seconds, at an expected loss."""

    name: str
    world_size: int
    after_s: float
    lost_node_s: float


@dataclass(frozen=True)
class Verdict:
    """`go` with `size` members, or not, and why. `again_at` is when the answer may change by time alone. `options` are
    those whose costs were compared, if any were, and `chosen` the name of one of them."""

    go: bool
    reason: str
    size: int = 0
    again_at: float | None = None
    options: tuple[Option, ...] = ()
    chosen: str = ""


class ScalingPolicy(Protocol):
    """Stateless and pure: the same facts give the same verdict in every incarnation of the controller.

    A policy never starts with fewer than `min_workers` or more than `max_workers`.
    """

    def start(self, facts: ScalingFacts) -> Verdict:
        """Asked while no generation runs: start one?"""
        ...

    def grow(self, facts: ScalingFacts) -> Verdict:
        """Asked while a generation trains: end it as planned to let more workers in?"""
        ...


class EagerScaling:
    """Start with `min_workers` or more, continue at once after a loss, grow when no further arrival is near."""

    def start(self, facts: ScalingFacts) -> Verdict:
        if facts.idle < facts.settings.min_workers:
            return _too_few(facts)
        gather_until = facts.waiting_since + facts.settings.gather_s
        more = facts.arriving + facts.pending_slots
        room = facts.idle < facts.settings.max_workers
        if facts.first_start and room and more and (facts.arriving or facts.now < gather_until):
            return _gathering(facts, _starting(facts), gather_until)
        return _start(facts)

    def grow(self, facts: ScalingFacts) -> Verdict:
        size = facts.grown
        if size <= facts.members:
            spare = facts.idle and facts.members < facts.settings.max_workers
            return Verdict(
                False, f"{facts.idle} idle of {min(facts.cells)} for a cell" if spare else "no worker to add"
            )
        newcomers = plural(facts.idle, "new worker")
        if facts.storage_failing:
            wait = verb(facts.idle, "waits", "wait")
            return Verdict(False, f"{newcomers} {wait}: growing needs a checkpoint and storage is failing")
        if facts.arriving and size < facts.settings.max_workers:
            return Verdict(False, f"{newcomers} ready; {_starting(facts)}")
        return Verdict(True, f"{newcomers} {verb(facts.idle)} ready: {facts.members} -> {size}", size)


class PatientScaling:
    """Few resizes: every start, also after a loss, waits `gather_s` for `max_workers`, and growth is one step to it."""

    def start(self, facts: ScalingFacts) -> Verdict:
        if facts.idle < facts.settings.min_workers:
            return _too_few(facts)
        gather_until = facts.waiting_since + facts.settings.gather_s
        if facts.idle < facts.settings.max_workers and facts.now < gather_until:
            return _gathering(facts, f"waiting {facts.settings.gather_s:g} s for more", gather_until)
        return _start(facts)

    def grow(self, facts: ScalingFacts) -> Verdict:
        if facts.members + facts.idle < facts.settings.max_workers:
            return Verdict(
                False, f"{facts.members + facts.idle} of {facts.settings.max_workers} workers; no growth yet"
            )
        return EagerScaling().grow(facts)


def _too_few(facts: ScalingFacts) -> Verdict:
    low = facts.settings.min_workers
    missing = low - facts.idle
    return Verdict(
        False,
        f"waiting for {plural(missing, 'more worker')}: {facts.idle} of at least {low} ready, "
        f"{facts.arriving} starting, {plural(facts.pending_slots, 'slot')} pending",
    )


def _starting(facts: ScalingFacts) -> str:
    return f"{facts.arriving} more {verb(facts.arriving)} starting"


def _gathering(facts: ScalingFacts, why: str, until: float) -> Verdict:
    return Verdict(False, f"{facts.idle} of {facts.settings.max_workers} workers ready; {why}", again_at=until)


def _start(facts: ScalingFacts) -> Verdict:
    low, high = facts.settings.min_workers, facts.settings.max_workers
    return Verdict(
        True,
        f"{plural(facts.idle, 'worker')} ready (at least {low}, at most {high})",
        whole_cells(min(facts.idle, high), *facts.cells),
    )
