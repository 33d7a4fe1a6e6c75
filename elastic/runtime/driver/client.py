"""Starting a run and talking to its controller, from a driver or from the command line."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.core.errors import ElasticError, RunNotFound, UsageError
from elastic.core.settings import RunSettings
from elastic.runtime import names
from elastic.runtime.controller import train_page
from elastic.runtime.controller.actor import ControllerActor
from elastic.runtime.driver.connection import connect as connect
from elastic.runtime.driver.controller_placement import Node, choose
from elastic.runtime.train_function import Entry

logger = logging.getLogger(__name__)

# A restarting controller answers again within seconds; after this limit it counts as lost.
_UNREACHABLE_S = 90.0
_CALL_TIMEOUT_S = 30.0
_LEAVE_S = 15.0
# A killed head is usually replaced within this time; looking for a run waits for it.
_HEAD_AWAY_S = 20.0


def start(settings: RunSettings, entry: Entry) -> RayRunHandle:
    """Start the controller of a run in the cluster that this process has joined (`connect`); it outlives this process.

    Raises UsageError when the run is in progress: a run never has two controllers.
    """
    try:
        return _create(settings, entry)
    except ValueError as error:
        if _make_way(settings.run_id):
            return start(settings, entry)
        raise UsageError(
            f"run {settings.run_id!r} is already running: follow it with `elastic watch {settings.run_id}`"
        ) from error


def _create(settings: RunSettings, entry: Entry) -> RayRunHandle:
    """Raises ValueError where the controller's name is taken."""
    actor_class: Any = ray.remote(ControllerActor)
    actor = actor_class.options(
        name=names.controller(settings.run_id), namespace=names.NAMESPACE, lifetime="detached", max_restarts=-1,
        # Ray ignores a soft affinity of an actor without resources (seen, 2.60).
        max_concurrency=1000, num_cpus=0, memory=1_000_000, scheduling_strategy=_placement(settings),
    ).remote(settings, entry, secrets.token_bytes(32), train_page.enabled())  # fmt: skip
    return RayRunHandle(settings.run_id, actor)


def _make_way(run_id: str) -> bool:
    """Whether the name is free now: the controller of a finished run stays for queries, and ends on request."""
    deadline = time.monotonic() + _LEAVE_S
    while time.monotonic() < deadline:
        try:
            handle = attach(run_id, None)
            if handle.result(0.0) is None:
                return False
            handle.leave()
        except RunNotFound:
            return True
        except ElasticError as error:
            logger.debug("the controller of run %s is on its way out: %s", run_id, error)
        time.sleep(0.1)
    return False


def _placement(settings: RunSettings) -> NodeAffinitySchedulingStrategy:
    nodes = [Node.from_ray(node) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    place = choose(nodes, ray.get_runtime_context().get_node_id(), settings.resources_per_worker)
    logger.info("the controller of run %s goes to node %s: %s", settings.run_id, place.node_id[:8], place.reason)
    return NodeAffinitySchedulingStrategy(place.node_id, soft=not place.only)


def attach(run_id: str, address: str | None) -> RayRunHandle:
    """A handle of a run in progress; a restarting head is waited for. Raises RunNotFound."""
    connect(address, wait_s=_HEAD_AWAY_S)
    try:
        return RayRunHandle(run_id, ray.get_actor(names.controller(run_id), names.NAMESPACE))
    except ValueError as error:
        raise RunNotFound(f"no run {run_id!r} is running in this cluster") from error
    except ray.exceptions.GetTimeoutError as error:
        raise ElasticError(
            f"Ray's control store does not say where run {run_id!r} is; its head may be away, so try again later"
        ) from error


class RayRunHandle:
    """Implements `elastic_jobs.running.handle.RunHandle` on Ray. Every wait is limited; a restarting controller is
    waited for."""

    def __init__(self, run_id: str, actor: Any) -> None:
        self._run_id = run_id
        self._actor = actor

    @property
    def run_id(self) -> str:
        return self._run_id

    def progress(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._call("progress")
        return found

    def wait_step(self, step: int, timeout_s: float) -> bool:
        return bool(self._call("wait_step", step, timeout_s, wait_s=timeout_s))

    def result(self, timeout_s: float) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self._call("wait_end", timeout_s, wait_s=timeout_s)
        return found

    def stop(self, reason: str) -> None:
        self._call("stop", reason)

    def leave(self) -> None:
        """Let the controller of a finished run end now; otherwise it stays for some minutes for queries."""
        try:
            self._call("leave")
        except ElasticError:
            # It has ended already.
            return

    def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        limit = time.monotonic() + _UNREACHABLE_S + wait_s
        while True:
            try:
                return ray.get(getattr(self._actor, method).remote(*args), timeout=_CALL_TIMEOUT_S + wait_s)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > limit:
                    raise ElasticError(
                        f"the controller of run {self._run_id!r} has not answered for {_UNREACHABLE_S:.0f} s; "
                        f"its checkpoints are safe: `elastic resume {self._run_id}`"
                    ) from error
            except ray.exceptions.ActorDiedError as error:
                raise ElasticError(
                    f"the controller of run {self._run_id!r} is gone with its cluster; `elastic resume {self._run_id}`"
                ) from error
