"""Do the ranks of a cell share their sequences, as the job says that they do?"""

from __future__ import annotations

import logging

from elastic.engines.base import StepOutcome
from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

# By this step of a generation its exchanges are in the ledger, on a device too.
_BY_STEP = 3


class SharingWatch:
    """Of one generation with `sp` ranks to a cell."""

    def __init__(self, sp: int) -> None:
        self._sp = sp
        # Finished steps up to the first exchange between ranks of a cell.
        self._unshared: int | None = 0 if sp > 1 else None

    def look(self, outcome: StepOutcome) -> None:
        """Ranks that do not share their sequences all compute the same: right, and no faster."""
        if self._unshared is None:
            return
        self._unshared += 1
        if any(use.axis == "sp" for use in outcome.collectives):
            self._unshared = None
        elif self._unshared == _BY_STEP:
            warn_once(
                logger,
                f"mesh: {{sp: {self._sp}}}: the script shares no sequences, so that all workers of a cell "
                "compute the same; use elastic.sequence (docs/parallelism.md), or leave mesh out",
            )
