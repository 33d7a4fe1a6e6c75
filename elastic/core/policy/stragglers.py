"""Straggler detection: medians of windows, several in a row, compared with how each worker began.

With synchronous collectives every rank shows the same step time, so ranks are compared by their own time, the time
outside of collectives. "Step > median + 3 MAD" alarms 51,000 times in 1,000 healthy rank-hours (64 ranks, steps
of 2 s, 3 % noise); medians of 30 steps above 1.05 times the peers' in three windows running not once in 12,800.

Like the tables of `liveness.py` this has no clock and decides nothing; a restarted controller has no history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from elastic.core.data.collectives import CollectiveUse
from elastic.core.events import CollectivesSlowed, StragglerFound
from elastic.core.settings import StragglerSettings


@dataclass
class _Worker:
    """`usual`: its own time as a multiple of its peers' in its first windows; `factor`: in the last one. `slow`:
    windows in a row that were too far above the usual."""

    first: list[float] = field(default_factory=list)
    usual: float | None = None
    factor: float = 1.0
    slow: int = 0


class StragglerWatch:
    """Call `begin` for every generation, then `step` for every finished step; both feed the state machine."""

    def __init__(self, settings: StragglerSettings) -> None:
        self._settings = settings
        self._known: dict[int, _Worker] = {}
        self._generation = -1
        self._members: tuple[int, ...] = ()
        self._window: list[Sequence[float]] = []

    def begin(self, generation: int, members: Sequence[int]) -> None:
        """`members[rank]` is a worker. The history of members that stay is kept, but for those that become rank 0 or
        were it: that rank has more to do (it writes the logs), so that another ratio is usual for them."""
        changed = {*self._members[:1]} ^ {*members[:1]}
        kept = {worker: known for worker, known in self._known.items() if worker not in changed}
        self._generation, self._members, self._window = generation, tuple(members), []
        self._known = {worker: kept.get(worker) or _Worker() for worker in members}

    def step(
        self, generation: int, noncollective_s: Sequence[float], slowed: Sequence[str] = ()
    ) -> tuple[StragglerFound, ...]:
        """By rank: seconds of a step outside of collectives, 0.0 where they are not measured. Not for a first step.

        `slowed`: why a rank's device is slower than it could be, where any device says so.
        """
        comparable = len(noncollective_s) == len(self._members) > 1 and min(noncollective_s) > 0.0
        if self._settings.policy == "off" or generation != self._generation or not comparable:
            return ()
        self._window.append(noncollective_s)
        if len(self._window) < self._settings.window_steps:
            return ()
        window, self._window = self._window, []
        why = slowed or [""] * len(self._members)
        return self._judge([median(times) for times in zip(*window, strict=True)], why)

    def known(self) -> dict[int, float]:
        """The stragglers of the last window: worker -> its own time as a multiple of its peers'."""
        return {worker: known.factor for worker, known in self._known.items() if known.slow >= self._settings.windows}

    def _judge(self, typical_s: Sequence[float], slowed: Sequence[str]) -> tuple[StragglerFound, ...]:
        """`typical_s`: the medians of the ranks' own times in a full window."""
        events = []
        peers = _medians_of_others(typical_s)
        for worker, own_s, peers_s, why in zip(self._members, typical_s, peers, slowed, strict=True):
            factor = own_s / peers_s
            count = self._windows_slow(self._known[worker], factor)
            needed = self._settings.windows
            # One event when the straggler is found, and one when another window confirms it.
            if count in (needed, needed + 1):
                confirmed, rounded = count > needed, round(factor, 4)
                found = StragglerFound(self._generation, worker, rounded, own_s, peers_s, count, confirmed, why)
                events.append(found)
        return tuple(events)

    def _windows_slow(self, worker: _Worker, factor: float) -> int:
        """The number of consecutive slow windows of the worker, this one included."""
        worker.factor = round(factor, 4)
        if worker.usual is None:
            worker.first.append(factor)
            if len(worker.first) >= self._settings.calibration_windows:
                # A rank may have more to do than others (it writes the logs); slower than `factor` is never usual.
                worker.usual = min(max(1.0, fmean(worker.first)), self._settings.factor)
            return 0
        worker.slow = worker.slow + 1 if factor > self._settings.factor * worker.usual else 0
        return worker.slow


class CollectiveWatch:
    """Whether the collectives of a generation have become slower than they were at its beginning, by more than rank 0
    waits in them for ranks that compute longer: then a connection has. Rank 0's ledger does not say which one.

    Call `begin` for every generation, then `step` for every finished step but its first. Only operations that move as
    much as in the first windows are compared.
    """

    def __init__(self, settings: StragglerSettings) -> None:
        self._settings = settings
        self.begin(-1)

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._window: list[Sequence[CollectiveUse]] = []
        self._first: list[Sequence[CollectiveUse]] = []
        self._waits: list[float] = []
        self._usual: dict[_Moved, float] = {}
        self._usual_wait_s = 0.0
        self._slow = 0

    def step(
        self, generation: int, uses: Sequence[CollectiveUse], noncollective_s: Sequence[float] = ()
    ) -> CollectivesSlowed | None:
        """`uses` are rank 0's; `noncollective_s` as for `StragglerWatch`: whoever is done first waits for the last."""
        settings = self._settings
        if settings.policy == "off" or generation != self._generation or not uses:
            return None
        measured = bool(noncollective_s) and min(noncollective_s) > 0.0
        self._waits.append(max(noncollective_s) - noncollective_s[0] if measured else 0.0)
        self._window.append(uses)
        if len(self._window) < settings.window_steps:
            return None
        window, self._window = self._window, []
        if not self._usual:
            self._first += window
            if len(self._first) >= settings.window_steps * settings.calibration_windows:
                self._usual, self._usual_wait_s = _typical_s(self._first), median(self._waits)
                self._first, self._waits = [], []
            return None
        now, wait_s = _typical_s(window), median(self._waits)
        self._waits = []
        shared = self._usual.keys() & now.keys()
        usual_s, now_s = sum(self._usual[moved] for moved in shared), sum(now[moved] for moved in shared)
        now_s -= min(now_s, max(0.0, wait_s - self._usual_wait_s))
        slower = usual_s > 0 and now_s > settings.collective_factor * usual_s
        self._slow = self._slow + 1 if slower else 0
        if self._slow != settings.windows:
            return None
        return CollectivesSlowed(generation, round(now_s / usual_s, 4), usual_s, now_s, self._slow)


# Operation, axis, dtype, calls and bytes of a step.
_Moved = tuple[str, str, str, int, int]


def _typical_s(steps: Sequence[Sequence[CollectiveUse]]) -> dict[_Moved, float]:
    """The median seconds of what at least half of the steps have moved alike."""
    seconds: dict[_Moved, list[float]] = {}
    for uses in steps:
        for use in uses:
            seconds.setdefault((use.op, use.axis, use.dtype, use.calls, use.bytes), []).append(use.seconds)
    return {moved: median(found) for moved, found in seconds.items() if 2 * len(found) >= len(steps)}


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranked = [values[index] for index in order]
    found = [0.0] * len(values)
    half = (len(values) - 1) // 2
    for place, index in enumerate(order):
        # Without the one at `place` the upper middle of the others is one further to the right if it was left of it.
        upper = ranked[half + 1] if place <= half else ranked[half]
        lower_place = half - 1 if len(values) % 2 else half
        lower = ranked[lower_place + 1] if place <= lower_place else ranked[lower_place]
        found[index] = (lower + upper) / 2
    return found
