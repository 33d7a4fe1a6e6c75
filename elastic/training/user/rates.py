"""Learning rates that the loop sets from a counter of its own: a repeated step has others then, and after a resume the
first step has those of the run's first step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

_KEPT = 1024


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """By parameter group; empty where there are none."""
    return tuple(float(group["lr"]) for group in getattr(optimizer, "param_groups", ()) if "lr" in group)


class Rates:
    """Of one loop, which stays while generations change. `restored` when a generation begins, `check_first` before its
    first update, `check` after every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, ...]] = {}
        self._said = False
        self._restored: tuple[float, ...] | None = None

    def restored(self, rates: tuple[float, ...] | None) -> None:
        """Those that the optimizer has with its restored state; None where nothing was restored."""
        self._restored = rates

    def check_first(self, step: int, optimizer: Any, first: Sequence[float]) -> None:
        """Warns, before the generation's first update, where `step` would be made with the rates of the run's `first`
        step: set by the loop, since the restored ones are others."""
        restored, self._restored = self._restored, None
        if restored is None or self._said:
            return
        now = rates_of(optimizer)
        if now and _same(now, first) and not _same(now, restored):
            self._said = True
            logger.warning(
                "step %d has learning rate %g, as the run's first step, and the restored state has %g. A rate that the "
                "loop sets from a counter of its own begins anew where the training function does: count by "
                "elastic.get_context().step",
                step, now[0], restored[0],
            )  # fmt: skip

    def check(self, step: int, rates: Sequence[float]) -> None:
        """Warns, once, where `step` had other rates the first time."""
        before, now = self._known.pop(step, None), tuple(rates)
        self._known[step] = now
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        if before is None or self._said or len(before) != len(now):
            return
        if not _same(before, now):
            self._said = True
            logger.warning(
                "step %d is repeated with learning rate %g; the first time it had %g. A rate that the loop sets from a "
                "counter of its own is ahead from here on, as the counter is: count by elastic.get_context().step",
                step, now[0], before[0],
            )  # fmt: skip


def _same(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) for one, other in zip(some, others, strict=True)
    )
