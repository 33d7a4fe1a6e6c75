"""The attendant of a run as an actor: one per run, detached, started by the run's first driver.

It is on the head node, where the Jobs server is: there it reaches the server wherever that listens (by default on
loopback alone), nothing but what takes the server along takes it along, and no other node is kept from being idle by
it. It asks for nothing but to be there, and is restarted with the head.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import ray

from elastic.core.errors import ElasticError
from elastic.observe.text import clean
from elastic.runtime import names
from elastic.runtime.driver.controller_placement import HEAD
from elastic_jobs.submit.jobs_api import JobsApi
from elastic_jobs.submit.ray_jobs_api import RayJobsApi, own_server
from elastic_jobs.submit.supervisor import Attendance

logger = logging.getLogger(__name__)

# Every node has a sliver of its own; a thousand runs share that of the head.
_SLIVER = 0.001
_AGAIN_S = 2.0
_TRIES = 5


class AttendantActor:
    """Ends itself when the run is over. A restarted one begins anew with the run's newest attempt."""

    def __init__(self, run_id: str) -> None:
        # It talks to the head alone, which a proxy of the job's environment would not reach.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
        self._run_id = run_id
        self._here = ray.get_runtime_context().current_actor
        self._attendance = Attendance(run_id, _open_api, self._goes_on)
        threading.Thread(target=self._keep, name="elastic-attendance", daemon=True).start()

    def ask(self, attempt: int) -> bool:
        return self._attendance.ask(attempt)

    def _keep(self) -> None:
        try:
            self._attendance.keep()
        except ElasticError as error:
            logger.error("run %s is not attended any more: %s", self._run_id, clean(str(error)))
        except Exception:
            logger.exception("run %s is not attended any more", self._run_id)
        finally:
            ray.kill(self._here, no_restart=True)

    def _goes_on(self) -> bool:
        try:
            ray.get_actor(names.controller(self._run_id), names.NAMESPACE)
        except ValueError:
            return False
        except ray.exceptions.RayError as error:
            # The control store is away as well: nobody can say.
            logger.info("the controller of run %s cannot be looked for: %s", self._run_id, error)
        return True


def _open_api() -> JobsApi:
    return RayJobsApi(own_server())


class RayAttendant:
    """Implements `elastic_jobs.backend.AttendantLike`: the attendant as a driver sees it."""

    def __init__(self, run_id: str, attempt: int) -> None:
        """This process has joined the cluster."""
        self._run_id = run_id
        self._attempt = attempt
        self._tries = 0
        self._next = 0.0
        self._answer: Any = None
        self._settled = False

    def look(self) -> None:
        if self._settled or time.monotonic() < self._next:
            return
        try:
            if self._answer is None:
                self._answer = self._actor().ask.remote(self._attempt)
            if not ray.wait([self._answer], timeout=0)[0]:
                return
            self._settled = ray.get(self._answer)
            why = "it is just ending"
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            # Its head is being replaced, which takes as long as it takes.
            why, self._tries = clean(str(error)), 0
        except (ray.exceptions.RayError, ValueError) as error:
            why = clean(str(error))
        self._answer = None
        if not self._settled:
            self._again(why)

    def _again(self, why: str) -> None:
        """One of the attempt before, on its way out, does not stand in the way for long; one that cannot be started
        must not be tried for ever."""
        self._tries += 1
        self._next = time.monotonic() + _AGAIN_S
        if self._tries == _TRIES:
            self._settled = True
            logger.warning("nobody will replace a driver of run %s that is lost: %s", self._run_id, why)

    def _actor(self) -> Any:
        actor_class: Any = ray.remote(AttendantActor)
        return actor_class.options(
            name=names.attendant(self._run_id), namespace=names.NAMESPACE, lifetime="detached", max_restarts=-1,
            get_if_exists=True, num_cpus=0, resources={HEAD: _SLIVER},
        ).remote(self._run_id)  # fmt: skip
