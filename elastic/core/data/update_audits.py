"""Audits of the optimizer's state and step: which rank is wrong, from what the ranks have found.

Between two updates no byte of the masters and moments changes: a rank on which one does has a faulty memory. And the
update of a weight follows from the weight, its moments and its gradient: other ranks compute it again for some weights
of every rank, from the values before the update, and compare it with the values after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.core.data.audits import MARGIN, MOST_ROUNDING, Verdict, listed_ranks


@dataclass(frozen=True)
class Recomputed:
    """What rank `rank` found when it computed a rank's update again: it differs by `apart`, relative to the size of
    the values, most in `column` of `element` (numbers of what both have). NaN: it could not be computed there."""

    rank: int
    apart: float
    column: int = 0
    element: int = 0


def update_tolerance(own: Sequence[Recomputed], before: float = 0.0) -> float | None:
    """The difference that counts as none, from what the ranks found about their own updates, `before` being that of
    the audit before.

    Not from the largest difference: that of a faulty rank must not make the others tolerant. None where most ranks
    cannot repeat their own updates: then not a rank is at fault, but the step depends on more than a weight's own
    values.
    """
    found = sorted(value.apart for value in own if not math.isnan(value.apart))
    if sum(apart > MOST_ROUNDING for apart in found) * 2 > len(found):
        return None
    measured = found[-2] if len(found) > 1 else 0.0
    return max(before, min(MARGIN * measured, MOST_ROUNDING))


def judge_updates(found: Mapping[int, Sequence[Recomputed]], tolerance: float) -> Verdict:
    """`found[rank]`: what this rank itself, then others have found about the update of `rank`.

    Wrong is a rank whose update it cannot repeat itself, or that all others dispute; where only one of several others
    does, that one.
    """
    wrong: list[int] = []
    undecided: list[int] = []
    told: list[str] = []
    for rank, statements in found.items():
        heard = [each for each in statements if not math.isnan(each.apart)]
        against = [each for each in heard if each.apart > tolerance]
        if not against:
            continue
        others = [each.rank for each in against if each.rank != rank]
        agreeing = [each.rank for each in heard if each not in against and each.rank != rank]
        who = listed_ranks(others) if others else f"rank {rank} itself"
        apart = max(each.apart for each in against)
        told.append(f"the update of rank {rank} differs by {apart:.2g} from what {who} computed from the same state")
        if len(others) < len(against) or len(others) > 1:
            wrong.append(rank)
        elif agreeing:
            wrong += others
        else:
            undecided += [rank, *others]
    return Verdict(
        tuple(sorted(set(wrong))), tuple(sorted(set(undecided) - set(wrong))), "; ".join(dict.fromkeys(told))
    )


def of_the_script(changed: Sequence[bool]) -> bool:
    """Has the script changed the state, rather than a fault? Then most ranks have."""
    return sum(changed) * 2 > len(changed)
