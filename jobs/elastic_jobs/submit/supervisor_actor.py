"""The supervisor of a run as an actor: one per run, detached, started by the run's first driver.

It runs on the head node, next to the Jobs server. There it reaches the server on any address
(by default the server listens on loopback only), is lost only together with the server, and keeps no other node busy.
It reserves almost nothing and is restarted with the head.
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
from elastic_jobs.submit.supervisor import Supervisor

logger = logging.getLogger(__name__)

# Of the resource that Ray gives to the head node (1.0); a thousand runs fit.
_SLIVER = 0.001
_AGAIN_S = 2.0
_TRIES = 5


class SupervisorActor:
    """Ends itself when the run is over. After a restart it begins with the newest attempt of the run."""

    def __init__(self, run_id: str) -> None:
        # The actor talks only to the head, which a proxy from the job's environment may not reach.
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
        self._run_id = run_id
        self._here = ray.get_runtime_context().current_actor
        self._supervisor = Supervisor(run_id, _open_api, self._goes_on)
        threading.Thread(target=self._keep, name="elastic-supervisor", daemon=True).start()

    def ask(self, attempt: int) -> bool:
        return self._supervisor.ask(attempt)

    def _keep(self) -> None:
        try:
            self._supervisor.keep()
        except ElasticError as error:
            logger.error("run %s is no longer supervised: %s", self._run_id, clean(str(error)))
        except Exception:
            logger.exception("run %s is no longer supervised", self._run_id)
        finally:
            ray.kill(self._here, no_restart=True)

    def _goes_on(self) -> bool:
        try:
            ray.get_actor(names.controller(self._run_id), names.NAMESPACE)
        except ValueError:
            return False
        except ray.exceptions.RayError as error:
            # The control store is unreachable as well, so the answer is unknown.
            logger.info("cannot look up the controller of run %s: %s", self._run_id, error)
        return True


def _open_api() -> JobsApi:
    return RayJobsApi(own_server())


class RaySupervisor:
    """Implements `elastic_jobs.running.backend.SupervisorLike`: the driver's side of the supervisor."""

    def __init__(self, run_id: str, attempt: int) -> None:
        """The process must have joined the cluster."""
        self._run_id = run_id
        self._attempt = attempt
        self._tries = 0
        self._next = 0.0
        self._answer: Any = None
        self._settled = False

    def ensure(self) -> None:
        if self._settled or time.monotonic() < self._next:
            return
        try:
            if self._answer is None:
                self._answer = self._actor().ask.remote(self._attempt)
            if not ray.wait([self._answer], timeout=0)[0]:
                return
            self._settled = ray.get(self._answer)
            why = "the previous supervisor is ending"
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            # The head is being replaced; that does not count as a try.
            why, self._tries = clean(str(error)), 0
        except (ray.exceptions.RayError, ValueError) as error:
            why = clean(str(error))
        self._answer = None
        if not self._settled:
            self._again(why)

    def _again(self, why: str) -> None:
        """Try again later: a supervisor that is ending is gone soon. Limited, in case none can be started."""
        self._tries += 1
        self._next = time.monotonic() + _AGAIN_S
        if self._tries == _TRIES:
            self._settled = True
            logger.warning("no supervisor for run %s, so a lost driver will not be replaced: %s", self._run_id, why)

    def _actor(self) -> Any:
        actor_class: Any = ray.remote(SupervisorActor)
        return actor_class.options(
            name=names.supervisor(self._run_id), namespace=names.NAMESPACE, lifetime="detached", max_restarts=-1,
            get_if_exists=True, num_cpus=0, resources={HEAD: _SLIVER},
        ).remote(self._run_id)  # fmt: skip
