"""The time ledger: which activity owns each instant of a run. (The ledger of samples is `core.data.sample_ledger`.)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from elastic.core.data.sample_ledger import SampleCount as SampleCount
from elastic.core.data.sample_ledger import SampleLedger as SampleLedger
from elastic.core.run.phase import Closing, Ending, Joining, Pausing, Training, Waiting
from elastic.core.run.state import RunState

QUEUE = "queue"
PROVISION = "provision"
START = "start"
INIT = "init"
RESTORE = "restore"
RESHARD = "reshard"
VERIFY = "verify"
PRODUCTIVE = "productive"
REPLAY = "replay"
DETECT = "detect"
DECIDE = "decide"
WAIT_FOR_CAPACITY = "wait for capacity"
CHECKPOINT_STALL = "checkpoint stall"
DATA_STALL = "data stall"
STRAGGLER_EXCESS = "straggler excess"
PAUSED = "paused"
UNKNOWN = "unknown"

OWNERS = (
    QUEUE, PROVISION, START, INIT, RESTORE, RESHARD, VERIFY, PRODUCTIVE, REPLAY, DETECT, DECIDE, WAIT_FOR_CAPACITY,
    CHECKPOINT_STALL, DATA_STALL, STRAGGLER_EXCESS, PAUSED, UNKNOWN,
)  # fmt: skip

# A ledger keeps the times of at most this many single steps; those of older steps in groups of this many.
_MOST_PARTS, _TOGETHER = 4_000, 100

# Steps may end while these own the time: a planned end waits for the current step.
_STEPPING = (PRODUCTIVE, PAUSED)


class Span(NamedTuple):
    """Some time, in nanoseconds, and the accelerator-nanoseconds that were held in it."""

    ns: int
    held: int

    def plus(self, other: Span) -> Span:
        return Span(self.ns + other.ns, self.held + other.held)

    def split(self, ns: int) -> tuple[Span, Span]:
        """At most `ns` nanoseconds of it with their share of the accelerators' time, and what is left.

        Rounding keeps the sum, and both parts' accelerators between the fewest and the most that the whole had.
        """
        ns = max(0, min(self.ns, ns))
        part = Span(ns, self.held * ns // self.ns if self.ns else 0)
        return part, Span(self.ns - part.ns, self.held - part.held)


_NONE = Span(0, 0)


@dataclass(init=False)
class TimeLedger:
    """Gives every instant exactly one owner. Times are wall clock seconds and may stand still, never decrease.

    The time of a training step is `unknown` until a checkpoint covers the step: `commit` makes it productive,
    `rollback` makes it replay, since the step must be repeated. Times are whole nanoseconds, so that the parts add up
    to the whole exactly.

    Every account has accelerator-seconds, too: an instant counts as often as accelerators are held then, which `hold`
    tells. A part of an account takes its share of both, so that no owner's time ever has fewer accelerators than were
    held at the least, or more than at the most.
    """

    _start: int
    _now: int
    _owner: str
    _totals: dict[str, Span]
    # Time since the last step ended: part of the next step, if there is one.
    _open: dict[str, Span]
    # Time of steps that no checkpoint covers yet, and of steps up to a checkpoint.
    _tentative: list[tuple[int, Span]]
    _covered: list[tuple[int, Span]]
    _last_step: int
    # Nanoseconds of a step.
    _usual: int
    # Accelerators that are held now.
    _held: int

    def __init__(self, now: float, owner: str = QUEUE, held: int = 0) -> None:
        self._start = self._now = _nanoseconds(now)
        self._owner = owner
        self._totals = dict.fromkeys(OWNERS, _NONE)
        self._open = dict.fromkeys(_STEPPING, _NONE)
        self._tentative = []
        self._covered = []
        self._last_step = 0
        self._usual = 0
        self._held = held

    def hold(self, count: int, now: float) -> None:
        """From `now` on so many accelerators are held."""
        self._advance(now)
        self._held = count

    def switch(self, owner: str, now: float) -> None:
        """From `now` on the time is `owner`'s. Raises KeyError for an owner that is not in OWNERS."""
        self._advance(now)
        if owner not in self._totals:
            raise KeyError(owner)
        if owner not in _STEPPING:
            self._close_open()
        self._owner = owner

    def step_done(
        self, step: int, now: float, checkpoint_stall_s: float = 0.0, data_stall_s: float = 0.0,
        straggler_excess_s: float = 0.0,
    ) -> None:  # fmt: skip
        """A step was completed; it owns the time since the previous step, less the stalls that it reports.

        A report after the end of its generation changes nothing: that time has another owner.
        """
        self._advance(now)
        if self._owner not in _STEPPING:
            return
        rest, self._open = _sum(self._open.values()), dict.fromkeys(_STEPPING, _NONE)
        stalls = {CHECKPOINT_STALL: checkpoint_stall_s, DATA_STALL: data_stall_s, STRAGGLER_EXCESS: straggler_excess_s}
        for owner, seconds in stalls.items():
            part, rest = rest.split(_nanoseconds(seconds))
            self._give(owner, part)
        self._tentative.append((step, rest))
        _fold(self._tentative)
        # Steps that are reported together share one instant: the first one gets the time of all.
        self._last_step, self._usual = step, rest.ns or self._usual

    def commit(self, step: int) -> None:
        """A checkpoint covers everything up to and including `step`."""
        covered = _sum(span for number, span in self._tentative if number <= step)
        self._tentative = [part for part in self._tentative if part[0] > step]
        if covered.ns:
            self._covered.append((step, covered))
            _fold(self._covered)

    def rollback(self, to_step: int) -> None:
        """The run continues after step `to_step`: the time of every later step was lost."""
        for parts in (self._tentative, self._covered):
            self._give(REPLAY, _sum(span for step, span in parts if step > to_step))
            parts[:] = [part for part in parts if part[0] <= to_step]

    def move(self, source: str, target: str, seconds: float) -> float:
        """Move up to `seconds` of `source`'s closed time to `target`, when the real owner is known only afterwards;
        returns the seconds that were moved. They take their share of the source's accelerator-seconds."""
        part, self._totals[source] = self._totals[source].split(_nanoseconds(seconds))
        self._give(target, part)
        return part.ns / 1e9

    def nanoseconds(self, now: float) -> dict[str, int]:
        """Every owner's time up to `now`; the values sum to the time since the start exactly."""
        return {owner: span.ns for owner, span in self._accounts(now).items()}

    def held_nanoseconds(self, now: float) -> dict[str, int]:
        """As `nanoseconds`, of accelerators: the values sum to the time of all that were held exactly."""
        return {owner: span.held for owner, span in self._accounts(now).items()}

    def totals(self, now: float) -> dict[str, float]:
        """Seconds by owner; owners without time are omitted."""
        return {owner: length / 1e9 for owner, length in self.nanoseconds(now).items() if length}

    def held_totals(self, now: float) -> dict[str, float]:
        """Accelerator-seconds by owner; owners in whose time none was held are omitted."""
        return {owner: length / 1e9 for owner, length in self.held_nanoseconds(now).items() if length}

    def wall_s(self) -> float:
        """Seconds from the start to the last reported time."""
        return (self._now - self._start) / 1e9

    def _advance(self, now: float) -> None:
        # A clock that was set back must not make any owner's time negative.
        until = max(self._now, _nanoseconds(now))
        account = self._open if self._owner in _STEPPING else self._totals
        length = until - self._now
        account[self._owner] = account[self._owner].plus(Span(length, length * self._held))
        self._now = until

    def _accounts(self, now: float) -> dict[str, Span]:
        self._advance(now)
        totals = dict(self._totals)
        totals[PRODUCTIVE] = _sum([totals[PRODUCTIVE], *(span for _, span in self._covered)])
        totals[UNKNOWN] = _sum([totals[UNKNOWN], self._open[PRODUCTIVE], *(span for _, span in self._tentative)])
        totals[PAUSED] = totals[PAUSED].plus(self._open[PAUSED])
        return totals

    def _give(self, owner: str, span: Span) -> None:
        self._totals[owner] = self._totals[owner].plus(span)

    def _close_open(self) -> None:
        """Training ended in the middle of a step: the usual time of a step counts as lost work, the rest as idle."""
        working = self._open[PRODUCTIVE]
        lost, idle = working.split(self._usual or working.ns)
        if lost.ns:
            self._tentative.append((self._last_step + 1, lost))
        self._give(DETECT, idle)
        self._give(PAUSED, self._open[PAUSED])
        self._open = dict.fromkeys(_STEPPING, _NONE)


def owner_of(state: RunState) -> str:
    """The owner of the time while the run is in this state."""
    phase = state.phase
    if isinstance(phase, Training):
        return PRODUCTIVE
    if isinstance(phase, Joining):
        return _joining(state, phase)
    if isinstance(phase, Pausing):
        return PAUSED
    if isinstance(phase, Ending):
        return DECIDE
    if isinstance(phase, Closing):
        return CHECKPOINT_STALL
    if isinstance(phase, Waiting):
        return _waiting(state)
    return UNKNOWN


def _joining(state: RunState, phase: Joining) -> str:
    if state.base is None or len(phase.joined) < state.world_size:
        return INIT
    incident = state.trouble.incident
    return RESHARD if incident is not None and incident.world_size != state.world_size else RESTORE


def _waiting(state: RunState) -> str:
    """Whether the run waits for starting workers: only while it has too few others."""
    slots = state.fleet.slots
    if state.fleet.idle >= state.settings.scaling.min_workers:
        return DECIDE
    if len(state.fleet.workers) >= state.settings.scaling.min_workers:
        return START
    if state.generation > state.first_generation:
        return WAIT_FOR_CAPACITY
    return PROVISION if len(slots) > len(slots.pending) else QUEUE


def _fold(parts: list[tuple[int, Span]]) -> None:
    """Join the older half of too many parts, so that a run of any length keeps a bounded number.

    A joined part counts as its last step: a rollback of more than 2,000 steps is exact to `_TOGETHER` steps, and the
    sum is always exact.
    """
    if len(parts) > _MOST_PARTS:
        old = parts[: _MOST_PARTS // 2]
        groups = [old[first : first + _TOGETHER] for first in range(0, len(old), _TOGETHER)]
        parts[: len(old)] = [(max(step for step, _ in group), _sum(span for _, span in group)) for group in groups]


def _sum(spans: Iterable[Span]) -> Span:
    ns = held = 0
    for span in spans:
        ns += span.ns
        held += span.held
    return Span(ns, held)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
