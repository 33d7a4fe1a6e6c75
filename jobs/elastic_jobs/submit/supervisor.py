"""Attending a run from inside its cluster, so that a lost driver is replaced although nobody follows.

The rules are those of whoever follows (`elastic_jobs.submit.supervision`); here nothing is shown. What is added is how
it ends: once the newest attempt has ended and no driver has asked meanwhile for more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic.observe.text import clean
from elastic_jobs.submit.jobs_api import JobsApi, Unreachable
from elastic_jobs.submit.supervision import Attendant, Clock

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0


class Attendance:
    """Of one run. `open_api` reaches the cluster's own Jobs server, wherever that is by now; `goes_on` says whether
    the run still has a controller. Two of them are as harmless as two who follow."""

    def __init__(
        self, run_id: str, open_api: Callable[[], JobsApi], goes_on: Callable[[], bool], clock: Clock | None = None
    ) -> None:
        self._run_id = run_id
        self._open_api = open_api
        self._goes_on = goes_on
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._asked = 0
        self._leaving = False

    def ask(self, attempt: int) -> bool:
        """Have this attempt attended, from another thread. False where that comes too late: it is about to end."""
        with self._lock:
            self._asked = max(self._asked, attempt)
            return not self._leaving

    def keep(self) -> None:
        """Returns when the run is over, or when no other attempt would help it.

        Raises ElasticError where nothing more can be done here: the cluster has forgotten the run or its package, or
        refuses its own token; or the Jobs server stays away (Unreachable) and the run has no controller either.
        """
        try:
            while not self._may_leave(self._attend()):
                self._clock.sleep(_PAUSE_S)
        finally:
            with self._lock:
                self._leaving = True

    def _attend(self) -> int:
        """To the end of the newest attempt, whose number it returns."""
        while True:
            try:
                attendant = Attendant(self._open_api(), None, logger.warning, self._clock)
                outcome = attendant.attend(attendant.find(self._run_id))
            except Unreachable as error:
                if not self._goes_on():
                    raise
                logger.warning("%s; run %s goes on, so this asks again", clean(str(error)), self._run_id)
                self._clock.sleep(_PAUSE_S)
                continue
            logger.warning(
                "attempt %d of run %s: %s, exit code %d%s", attendant.attempt, self._run_id, outcome.verdict.value,
                outcome.exit_code, f" ({clean(outcome.reason)})" if outcome.reason else "",
            )  # fmt: skip
            return attendant.attempt

    def _may_leave(self, judged: int) -> bool:
        with self._lock:
            # Whoever asks from now on is told no, and asks for another attendant.
            self._leaving = self._asked <= judged
            return self._leaving
