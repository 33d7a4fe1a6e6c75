"""Supervision from inside the cluster, so that a lost driver is replaced even when nobody follows the run.

The rules are those of a follower (`elastic_jobs.submit.supervision`), without output. This module adds the end of
supervision: when the newest attempt has ended and no driver has registered a newer one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic.observe.text import clean
from elastic_jobs.submit.jobs_api import JobsApi, Unreachable
from elastic_jobs.submit.supervision import Clock, Supervision

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0


class Supervisor:
    """Supervises one run. `open_api` reaches the cluster's own Jobs server at its present address; `goes_on` says
    whether the run still has a controller. Two supervisors of one run are as harmless as two followers."""

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
        """Register an attempt, from another thread. False if it is too late: this supervisor is about to end."""
        with self._lock:
            self._asked = max(self._asked, attempt)
            return not self._leaving

    def keep(self) -> None:
        """Returns when the run is over, or when another attempt would not help.

        Raises ElasticError when nothing more can be done: the cluster has lost the run or its package, or refuses its
        own token, or the Jobs server stays unreachable (Unreachable) and the run has no controller either.
        """
        try:
            while not self._may_leave(self._supervise()):
                self._clock.sleep(_PAUSE_S)
        finally:
            with self._lock:
                self._leaving = True

    def _supervise(self) -> int:
        """Supervise up to the end of the newest attempt; returns its number."""
        while True:
            try:
                supervision = Supervision(self._open_api(), None, logger.warning, self._clock)
                outcome = supervision.supervise(supervision.find(self._run_id))
            except Unreachable as error:
                if not self._goes_on():
                    raise
                logger.warning("%s; run %s continues; retrying", clean(str(error)), self._run_id)
                self._clock.sleep(_PAUSE_S)
                continue
            logger.warning(
                "attempt %d of run %s: %s, exit code %d%s", supervision.attempt, self._run_id, outcome.verdict.value,
                outcome.exit_code, f" ({clean(outcome.reason)})" if outcome.reason else "",
            )  # fmt: skip
            return supervision.attempt

    def _may_leave(self, judged: int) -> bool:
        with self._lock:
            # Later calls of `ask` return False, and the driver starts another supervisor.
            self._leaving = self._asked <= judged
            return self._leaving
