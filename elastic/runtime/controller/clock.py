"""The controller's clock: wall clock seconds that never go back and never jump."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Monotonic time plus one offset per incarnation.

    Everything that waits is measured by it: a wall clock that is set forth or back in the middle of a run moves no
    deadline and no heartbeat. `not_before` is the last time in the journal: an incarnation begins after the one before
    it, whatever its wall clock says.
    """

    def __init__(
        self,
        not_before: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._offset = max(wall(), not_before) - monotonic()

    def now(self) -> float:
        """Seconds since the epoch, by the wall clock as it was when this clock was made."""
        return self._monotonic() + self._offset

    def from_wall(self, when: float) -> float:
        """This clock's time of an instant that somebody else has given in wall clock seconds."""
        return when - self._wall() + self.now()
