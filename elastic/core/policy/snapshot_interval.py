"""How often to take a snapshot into memory: as often as costs next to nothing, measured on the run itself.

Every rank must come to the same answer, so `Cadence` is fed with figures that the ranks have agreed on; `Costs` is what
one rank measures.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

# Steps between snapshots that no measurement exceeds: a run of a second per step then loses 17 minutes at the worst.
_MAX_INTERVAL = 1000
# One snapshot in so many is left out even where each step could have one: without it nothing is left to compare with.
_COMPARE_EVERY = 32
_WINDOW = 32
# While the cost is not known: often enough to know it soon, and with steps between to compare with.
_UNKNOWN = 4
# Snapshots that do not count: each of the two segments is new memory once, and costs several times as much then.
_FIRST = 2
# So many steps of each sort are needed before their medians are worth comparing.
_ENOUGH_QUIET, _ENOUGH_BUSY = 5, 3


class Cadence:
    """Which steps get a snapshot. `every` fixes the interval; otherwise the cost stays under `cost_limit` of step time.

    A generation's first step is due: until there is a snapshot, a failure costs all that the generation has done. So is
    the last step of an epoch, in the place of a later one: a run that goes back over it repeats what the script does
    there.
    """

    def __init__(self, every: int | None, cost_limit: float) -> None:
        self.fixed = every is not None
        self.interval = every or 1
        self._cost_limit = cost_limit
        self._next: int | None = None
        self._taken = 0

    def due(self, step: int, ends_epoch: bool = False) -> bool:
        """`step` steps are finished. True at a generation's first one."""
        if self.fixed:
            return step % self.interval == 0
        # Of epochs shorter than the interval not each: the cost stays under its limit.
        return self._next is None or step >= self._next - self.interval * ends_epoch

    def passed(self, step: int, taken: bool) -> None:
        """A due step is over. One that could not be taken is made up for by the next step."""
        self._taken += taken
        pause = self.interval if taken else 1
        if taken and self.interval == 1 and self._taken % _COMPARE_EVERY == 0:
            pause = 2
        self._next = (max(step, self._next or 0) if taken else step) + pause

    def agreed(self, cost_s: float | None, step_s: float) -> None:
        """What a snapshot costs the training (None: not known yet), and how long a step without one takes, as all ranks
        see it; seconds."""
        if self.fixed:
            return
        if cost_s is None or step_s <= 0.0:
            self.interval = _UNKNOWN
            return
        wanted = math.ceil(cost_s / (self._cost_limit * step_s))
        # Down slowly: one lucky measurement must not buy a hundred expensive snapshots.
        self.interval = min(_MAX_INTERVAL, max(1, wanted, self.interval // 2))


class Costs:
    """What one rank measures: `step` after every step, `snapshot` after each snapshot that was begun."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=_WINDOW)
        self._busy: deque[float] = deque(maxlen=_WINDOW)
        self._stalls: deque[float] = deque(maxlen=_WINDOW)
        self._spans: deque[int] = deque(maxlen=_WINDOW)
        self._begun = 0

    def step(self, duration_s: float, busy: bool) -> None:
        """`busy`: a snapshot was being copied or sent while it ran. Not for a generation's first step."""
        (self._busy if busy else self._quiet).append(duration_s)
        if busy and self._spans:
            self._spans[-1] += 1

    def snapshot(self, stall_s: float) -> None:
        """A snapshot was begun, for which the training thread stood still for `stall_s`."""
        self._begun += 1
        if self._begun <= _FIRST:
            return
        self._stalls.append(stall_s)
        self._spans.append(0)

    @property
    def step_s(self) -> float:
        return median(self._quiet) if self._quiet else median(self._busy) if self._busy else 0.0

    @property
    def cost_s(self) -> float | None:
        """Seconds by which one snapshot delays the training; None until enough steps of both sorts can be compared."""
        if not self._stalls or len(self._quiet) < _ENOUGH_QUIET or len(self._busy) < _ENOUGH_BUSY:
            return None
        slower = max(0.0, median(self._busy) - median(self._quiet))
        return median(self._stalls) + slower * max(1.0, median(self._spans))
