"""When links are looked at, and when gradients begin to travel by another strategy.

Pure: every rank comes to the same from the same table. The choice is ski-rental over what all permitted strategies
would have cost: staying costs what the fastest one would have saved, and a switch is made when that has added up to
`_HYSTERESIS` times what a switch costs (Karlin et al. 1988: never more than a constant above what the best choice in
hindsight costs). After a switch there is none for a while: an incident that slows links down for a moment does not make
the run go back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_HYSTERESIS = 2.0
# Of the present cost: what is saved below that is within what a look cannot tell.
_WORTH = 0.05
# The first look is in this step of a generation, counted from 0: in the first ones processes are still starting.
_FIRST = 2
# Pauses between looks, after a switch, before there can be another.
_QUIET = 2
# Steps between two questions whether exchanges still take as long as they did. A change by this factor, in two windows
# in a row, is looked at.
WINDOW, _DRIFT = 10, 1.15
# While nothing is found the pauses between looks double, up to so many times `every`. A drift is looked at once the
# `_APART`-th part of `every` has passed, and twice as much with each look at a drift that has found nothing: exchanges
# may just vary. After the first of those the next look follows as soon: one may have been wrong.
_LONGEST, _APART = 2, 4


@dataclass(frozen=True)
class Choice:
    """`strategy` since step `since`. `regret_s` by strategy: seconds that it would have saved since then, less what it
    would have lost, never below zero."""

    strategy: str
    since: int
    regret_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Looks:
    """The looks at the links of one generation: the last one, the pause until the next, and how many seconds the
    exchanges of a step took in the first window after the last news. `slower`: they were in the last window, or faster.
    `misses`: looks at a drift in a row that have found nothing."""

    every: int
    last: int | None = None
    pause: int = 0
    usual_s: float | None = None
    slower: bool | None = None
    misses: int = 0

    @property
    def next(self) -> int:
        """The step of the next look, if exchanges take as long as they do."""
        return min(_FIRST, self.every - 1) if self.last is None else self.last + self.pause

    def window_ends(self, step: int) -> bool:
        """Are the ranks to agree, before this step, on how long exchanges take?"""
        return self.last is not None and step > self.last and (step - self.last) % WINDOW == 0

    def drifted(self, step: int, exchange_s: float) -> tuple[Looks, bool]:
        """Is it time for a look because exchanges take another time than after the last one? `exchange_s`: of a step
        of the window that ends, on the rank that waits least."""
        if self.usual_s is None or self.last is None:
            return replace(self, usual_s=exchange_s), False
        low, high = sorted((self.usual_s, exchange_s))
        now = exchange_s > self.usual_s if high > _DRIFT * low else None
        again = now is not None and now == self.slower
        return replace(self, slower=now), again and step - self.last >= (self.every // _APART) << self.misses

    def looked(self, step: int, found: bool, drifted: bool) -> Looks:
        """There was a look before this step, because exchanges have `drifted` or not; was another strategy `found`?"""
        if found:
            return Looks(self.every, step, self.every)
        if drifted and not self.misses:
            return Looks(self.every, step, max(1, self.every // _APART), misses=1)
        pause = min(max(2 * self.pause, self.every), _LONGEST * self.every)
        return Looks(self.every, step, pause, None if drifted else self.usual_s, misses=self.misses + drifted)


def is_faster(choice: Choice, costs: Mapping[str, float]) -> bool:
    """Does a look say that another strategy is faster by more than a look can be wrong?"""
    return min(costs.values()) < (1 - _WORTH) * costs[choice.strategy]


def first_choice(costs: Mapping[str, float], step: int) -> Choice:
    """The fastest; of equal ones the first."""
    return Choice(min(costs, key=lambda name: costs[name]), step)


def judged(choice: Choice, costs: Mapping[str, float], step: int, steps: int, switch_s: float, quiet: int) -> Choice:
    """After `steps` more steps, up to `step`, in each of which a strategy costs `costs` seconds. A switch costs
    `switch_s` seconds, and there is none within `quiet` steps of the last one."""
    now = costs[choice.strategy]
    regret = {
        name: max(0.0, choice.regret_s.get(name, 0.0) + (now - seconds) * steps)
        for name, seconds in costs.items()
        if name != choice.strategy
    }
    best = max(regret, key=lambda name: regret[name], default=choice.strategy)
    due = bool(regret) and regret[best] >= _HYSTERESIS * switch_s and costs[best] < (1 - _WORTH) * now
    return Choice(best, step) if due and step - choice.since >= quiet else replace(choice, regret_s=regret)


def after_look(
    choice: Choice, looks: Looks, costs: Mapping[str, float], step: int, switch_s: float, drifted: bool
) -> tuple[Choice, Looks]:
    """What was found before `step`: `costs`, and that a switch would cost `switch_s` seconds. `drifted`: it was looked
    at because exchanges take another time."""
    if looks.last is None:
        return first_choice(costs, step), looks.looked(step, True, drifted)
    steps = WINDOW if drifted else step - looks.last
    found = judged(choice, costs, step, steps, switch_s, _QUIET * looks.every)
    return found, looks.looked(step, found.strategy != choice.strategy, drifted)
