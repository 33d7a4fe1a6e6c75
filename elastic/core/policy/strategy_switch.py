"""By which strategy the gradients of each step travel where several are permitted, and when others are tried.

Pure: every rank comes to the same from the same seconds. What a strategy costs is what it has taken in steps of the
run itself: now and then some are taken by others than the one in use, which loses only what they are slower by. The
choice is ski-rental: staying costs what the fastest one would have saved, and a switch is made when that has added up
to `_HYSTERESIS` times what trying has lost (Karlin et al. 1988: never more than a constant above what the best choice
in hindsight costs). After a switch there is none for a while: an incident that slows links down for a moment does not
make the run go back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

_HYSTERESIS = 2.0
# Of the present cost: what is saved below that is within what a few steps cannot tell.
_WORTH = 0.05
# A strategy that took less than so many times the fastest in one step is looked at in so many more, in turn with the
# one in use.
_NEAR, _CLOSER = 1.3, 3
# A strategy is tried again when what that loses is less than this share of all exchanges since.
_RENT = 0.005
# Steps between two questions whether exchanges still take as long as they did. A change by this factor, in two windows
# in a row, is a reason to try.
WINDOW, _DRIFT = 10, 1.15
# While nothing is found the pauses between trials double, up to so many times `every`. After a drift, and after the
# first choice, the `_APART`-th part of `every` is enough; twice as much with each drift in which nothing was found:
# exchanges may just vary. After the first of those the next trial follows as soon: one may have been wrong.
_LONGEST, _APART = 2, 4


@dataclass(frozen=True)
class Choice:
    """`strategy` since step `since`. `regret_s` by strategy: seconds that it would have saved since then, less what it
    would have lost, never below zero."""

    strategy: str
    since: int
    regret_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Steps from `begin` on: `names` in turn, each `times` times."""

    begin: int
    names: tuple[str, ...]
    times: int

    @property
    def end(self) -> int:
        return self.begin + len(self.names) * self.times

    def at(self, step: int) -> str:
        return self.names[(step - self.begin) % len(self.names)]


@dataclass(frozen=True)
class Pauses:
    """When others are tried. `last`: the step at which the last trial ended, `pause` how long there is none if
    exchanges take as long as they do. `usual_s`: seconds of a step in the first window after the last news. `slower`:
    they were in the last window, or faster. `misses`: drifts in a row in which nothing was found."""

    every: int
    last: int = 0
    pause: int = 0
    usual_s: float | None = None
    slower: bool | None = None
    misses: int = 0

    def window(self, step: int, seconds: float) -> tuple[Pauses, bool]:
        """A window has ended before `step`, in which a step took `seconds`: is this a drift that is looked into?"""
        if self.usual_s is None:
            return replace(self, usual_s=seconds), False
        low, high = sorted((self.usual_s, seconds))
        now = seconds > self.usual_s if high > _DRIFT * low else None
        again = now is not None and now == self.slower
        return replace(self, slower=now), again and step - self.last >= (self.every // _APART) << self.misses

    def tried(self, step: int, found: bool, drifted: bool) -> Pauses:
        """A trial has ended before `step`; was it because of a drift, and was another strategy `found`?"""
        if found:
            return Pauses(self.every, step, self.every)
        if drifted and not self.misses:
            return Pauses(self.every, step, self._soon, misses=1)
        pause = min(max(2 * self.pause, self.every), _LONGEST * self.every)
        return Pauses(self.every, step, pause, None if drifted else self.usual_s, misses=self.misses + drifted)

    def first(self, step: int) -> Pauses:
        return Pauses(self.every, step, self._soon)

    @property
    def _soon(self) -> int:
        return max(1, self.every // _APART)


class Trial(Enum):
    """Why others are tried."""

    FIRST = "nothing is known of them"
    REGULAR = "they may have become faster"
    DRIFT = "exchanges take another time"


@dataclass(frozen=True)
class Switch:
    """The strategies of one generation; `names` are permitted.

    At `segment.end` the ranks agree on how many seconds of a step each of its names took, on the rank that waited
    least, and go on with `heard`. `costs`: what they were when last measured, `tried` the step of it; `trial`: the one
    under way, and whether it is at those that came near to the fastest. There is no switch before step `free`.
    """

    names: tuple[str, ...]
    segment: Segment
    choice: Choice
    pauses: Pauses
    costs: Mapping[str, float] = field(default_factory=dict)
    tried: Mapping[str, int] = field(default_factory=dict)
    trial: Trial | None = None
    closer: bool = False
    free: int = 0

    @classmethod
    def begin(cls, names: tuple[str, ...], every: int) -> Switch:
        """The first step of each tells nothing: processes are still starting, and connections are opened."""
        return cls(names, Segment(0, names, 1), Choice(names[0], 0), Pauses(every))

    def heard(self, found: Mapping[str, float]) -> Switch:
        """The segment has ended, in which a step took `found` seconds by strategy."""
        step = self.segment.end
        if not self.costs and self.trial is None:
            return replace(self, trial=Trial.FIRST, segment=Segment(step, self.names, 1))
        after = replace(self, costs={**self.costs, **found}, tried={**self.tried, **dict.fromkeys(found, step)})
        if self.trial is None:
            return after._after_window(step)
        return after._verdict(step, self.trial) if self.closer else after._after_one(step, self.trial)

    def _after_window(self, step: int) -> Switch:
        pauses, drifted = self.pauses.window(step, self.costs[self.choice.strategy])
        after = replace(self, pauses=pauses)
        due = after._due(step, drifted) if drifted or step - pauses.last >= pauses.pause else ()
        if not due:
            return after._stay(step)
        return replace(after, trial=Trial.DRIFT if drifted else Trial.REGULAR, segment=Segment(step, due, 1))

    def _due(self, step: int, drifted: bool) -> tuple[str, ...]:
        """What is worth a trial. After a drift all that is known is out of date."""
        now = self.costs[self.choice.strategy]
        return tuple(
            name
            for name in self.names
            if name != self.choice.strategy
            and (drifted or self.costs[name] - now <= _RENT * (step - self.tried[name]) * now)
        )

    def _after_one(self, step: int, trial: Trial) -> Switch:
        """One step of each: those that may be the fastest are looked at more closely, in turn with the present one."""
        best = min(self.costs[name] for name in {*self.segment.names, self.choice.strategy})
        near = {name for name in self.segment.names if self.costs[name] <= _NEAR * best}
        if not near:
            return self._verdict(step, trial)
        beside = {self.choice.strategy} if trial is not Trial.FIRST else set()
        names = tuple(name for name in self.names if name in near | beside)
        return replace(self, closer=True, segment=Segment(step, names, _CLOSER))

    def _verdict(self, step: int, trial: Trial) -> Switch:
        seen = {name: self.costs[name] for name in self.names if name in self.segment.names}
        after = replace(self, trial=None, closer=False)
        if trial is Trial.FIRST:
            return replace(after, choice=first_choice(seen, step), pauses=self.pauses.first(step))._stay(step)
        drifted = trial is Trial.DRIFT
        steps = 2 * WINDOW if drifted else step - self.pauses.last
        seen[self.choice.strategy] = self.costs[self.choice.strategy]
        choice = judged(self.choice, seen, step, steps, self._lost_s(), self.free)
        found = choice.strategy != self.choice.strategy
        pauses, free = self.pauses.tried(step, found, drifted), step + self.pauses.every if found else self.free
        return replace(after, choice=choice, pauses=pauses, free=free)._stay(step)

    def _lost_s(self) -> float:
        """What the trial took beyond as many steps of the strategy in use."""
        now, times = self.costs[self.choice.strategy], _CLOSER if self.closer else 1
        return times * sum(max(0.0, self.costs[name] - now) for name in self.segment.names)

    def _stay(self, step: int) -> Switch:
        return replace(self, segment=Segment(step, (self.choice.strategy,), min(WINDOW, self.pauses.every)))


def first_choice(costs: Mapping[str, float], step: int) -> Choice:
    """The fastest; of equal ones the first."""
    return Choice(min(costs, key=lambda name: costs[name]), step)


def judged(choice: Choice, costs: Mapping[str, float], step: int, steps: int, switch_s: float, free: int = 0) -> Choice:
    """After `steps` more steps, up to `step`, in each of which a strategy costs `costs` seconds. A switch costs
    `switch_s` seconds, and there is none before step `free`."""
    now = costs[choice.strategy]
    regret = {
        name: max(0.0, choice.regret_s.get(name, 0.0) + (now - seconds) * steps)
        for name, seconds in costs.items()
        if name != choice.strategy
    }
    best = max(regret, key=lambda name: regret[name], default=choice.strategy)
    due = bool(regret) and regret[best] >= _HYSTERESIS * switch_s and costs[best] < (1 - _WORTH) * now
    return Choice(best, step) if due and step >= free else replace(choice, regret_s=regret)
