"""Learning rates that the loop sets from a counter of its own: a repeated step has others then, and after a resume the
first step has those of the run's first step.

The platform cannot put such a counter right. Where it is found out in time, the training function is called again on
all ranks: one that begins to count with `elastic.get_context().step` is right then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from elastic.core.errors import CollectiveFailed, IntegrityError, UsageError

logger = logging.getLogger(__name__)

_KEPT = 1024


class RatesApart(IntegrityError):
    """Ranks would make a step with different learning rates, or repeat one with others than the first time."""


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """By parameter group; empty where there are none."""
    return tuple(float(group["lr"]) for group in getattr(optimizer, "param_groups", ()) if "lr" in group)


def are_apart(error: BaseException | None) -> bool:
    """Is it, or what has caused it, a RatesApart?"""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, RatesApart):
            return True
        seen.append(error)
        error = error.__cause__ if error.__cause__ not in (None, error) else error.__context__
    return False


class Rates:
    """Of one loop, which stays while generations change. `restored` when a generation begins, `before_update` before
    every update."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[float, ...]] = {}
        self._said = False
        self._restored: tuple[float, ...] | None = None
        # The step that a generation has ended in, and what its rates were then.
        self._left: tuple[int, tuple[float, ...]] | None = None

    def left(self, step: int, rates: tuple[float, ...]) -> None:
        """The generation ends in `step`, of which the loop has had a batch."""
        self._left = (step, rates)

    def restored(self, rates: tuple[float, ...] | None) -> None:
        """Those that the optimizer has with its restored state; None where nothing was restored."""
        self._restored = rates

    def before_update(
        self,
        step: int,
        now: tuple[float, ...],
        first: Sequence[float],
        unequal: Callable[[bool, int], bool] | None = None,
        resumed: bool = True,
    ) -> None:
        """`step` is about to be made with the rates `now`. Collective before the first update after a restore, where
        `unequal` is given: is a flag set on any rank, or does a number differ?

        Raises CollectiveFailed from RatesApart then, on all ranks, where ranks have different rates, or one of them
        would repeat `step` with others, or with the restored ones where the loop had set others; for a later step this
        warns, once. Where a first step would be made with the rates of the run's `first` one, set by the loop since the
        restored ones are others, warns after a resume, which may begin a schedule anew; else UsageError.
        """
        restored, self._restored = self._restored, None
        before = self._made.get(step, now)
        ahead = len(before) == len(now) and not _same(before, now)
        left, self._left = self._left, None
        if restored is not None:
            # Set where the step began, and not again for the rest of it: the restored rate is that of the step before.
            stale = left is not None and left[0] == step and not _same(left[1], restored) and _same(now, restored)
            ahead = ahead or stale
            number = xxhash.xxh3_64_intdigest(repr(now).encode()) >> 1
            if unequal is not None and unequal(ahead, number):
                apart = RatesApart(
                    f"step {step} would have other learning rates than the first time, or than other ranks have"
                )
                raise CollectiveFailed(str(apart)) from apart
            if now and _same(now, first) and not _same(now, restored):
                self._begins_anew(step, now[0], restored[0], resumed)
        if ahead and not self._said:
            self._said = True
            logger.warning(
                "step %d is repeated with learning rate %g; the first time it had %g. A rate that the loop sets from a "
                "counter of its own is ahead from here on, as the counter is: count by elastic.get_context().step",
                step, now[0], before[0],
            )  # fmt: skip
        self._made.pop(step, None)
        self._made[step] = now
        while len(self._made) > _KEPT:
            del self._made[next(iter(self._made))]

    def _begins_anew(self, step: int, now: float, restored: float, resumed: bool) -> None:
        sentence = (
            f"step {step} has learning rate {now:g}, as the run's first step, and the restored state has {restored:g}. "
            "A rate that the loop sets from a counter of its own begins anew where the training function does: count "
            "by elastic.get_context().step"
        )
        if not resumed:
            anneals = "keep a rate that follows something else (a validation loss) in elastic.state"
            raise UsageError(f"{sentence}, or begin the counter with it; {anneals}; and resume the run")
        if not self._said:
            self._said = True
            logger.warning(sentence)


def _same(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) for one, other in zip(some, others, strict=True)
    )
