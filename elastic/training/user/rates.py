"""The learning rates of the newest steps: a step that is repeated has the same ones, or the loop counts by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

logger = logging.getLogger(__name__)

_KEPT = 1024


class Rates:
    """Of one loop, which stays while generations change. `check` after every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, ...]] = {}
        self._said = False

    def check(self, step: int, rates: Sequence[float]) -> None:
        """Warns, once, where `step` had other rates the first time."""
        before, now = self._known.pop(step, None), tuple(rates)
        self._known[step] = now
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        if before is None or self._said or len(before) != len(now):
            return
        if not all(
            math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) for one, other in zip(before, now, strict=True)
        ):
            self._said = True
            logger.warning(
                "step %d is repeated with learning rate %g; the first time it had %g. A rate that the loop sets from a "
                "counter of its own is ahead from here on, as the counter is: count by elastic.get_context().step",
                step, now[0], before[0],
            )  # fmt: skip
