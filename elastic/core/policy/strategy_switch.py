"""When gradients begin to travel by another strategy: ski-rental over what all permitted ones would have cost.

Pure: every rank comes to the same from the same table. Staying costs what the fastest strategy would have saved; a
switch is made when that has added up to `_HYSTERESIS` times what a switch costs (ski-rental, Karlin et al. 1988: never
more than a constant above what the best choice in hindsight costs). After a switch there is none for a while: an
incident that slows links down for a moment does not make the run go back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_HYSTERESIS = 2.0


@dataclass(frozen=True)
class Choice:
    """`strategy` since step `since`. `regret_s` by strategy: seconds that it would have saved since then, less what it
    would have lost, never below zero."""

    strategy: str
    since: int
    regret_s: Mapping[str, float] = field(default_factory=dict)


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
    due = bool(regret) and regret[best] >= _HYSTERESIS * switch_s and costs[best] < now
    return Choice(best, step) if due and step - choice.since >= quiet else replace(choice, regret_s=regret)
