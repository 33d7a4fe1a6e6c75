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
from elastic.runtime.controller.actor import ControllerActor
from elastic.runtime.driver.connection import connect as connect
from elastic.runtime.driver.controller_placement import Node, choose
from elastic.runtime.train_function import Entry

logger = logging.getLogger(__name__)

# A controller that is being restarted answers again within seconds; one that stays away longer is lost.
_UNREACHABLE_S = 90.0
_CALL_TIMEOUT_S = 30.0
_LEAVE_S = 15.0
# A head that has been killed is placed again within so long, as a rule; whoever looks for a run waits for it.
_HEAD_AWAY_S = 20.0


def start_run(
    settings: RunSettings,
    entry_point: str,
    config: Mapping[str, Any] | None,
    address: str | None,
    folder: str | None = None,
) -> RayRunHandle:
    """Start the controller of a run. `folder` is where a relative entry point is looked for first."""
    connect(address)
    return start(settings, Entry.named(entry_point, config, folder))


def start(settings: RunSettings, entry: Entry) -> RayRunHandle:
    """Start the controller; it outlives this process.

    Raises UsageError when a run of this id is going on: there is never a second trainer of one run.
    """
    try:
        return _create(settings, entry)
    except ValueError as error:
        if _make_way(settings.run_id):
            return start(settings, entry)
        raise UsageError(
            f"run {settings.run_id!r} is going on already: follow it with `elastic watch {settings.run_id}`"
        ) from error


def _create(settings: RunSettings, entry: Entry) -> RayRunHandle:
    """Raises ValueError where the controller's name is taken."""
    actor_class: Any = ray.remote(ControllerActor)
    actor = actor_class.options(
        name=names.controller(settings.run_id), namespace=names.NAMESPACE, lifetime="detached", max_restarts=-1,
        # Ray gives no heed to a soft affinity of an actor that asks for nothing (seen, 2.60).
        max_concurrency=1000, num_cpus=0, memory=1_000_000, scheduling_strategy=_placement(settings),
    ).remote(settings.to_json(), entry, secrets.token_bytes(32))  # fmt: skip
    return RayRunHandle(settings.run_id, actor)


def _make_way(run_id: str) -> bool:
    """Whether the name is free now: the controller of a run that is over stays to be asked, and leaves if told."""
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
    """A handle of a run that goes on; a head that is being restarted is waited for. Raises RunNotFound."""
    connect(address, wait_s=_HEAD_AWAY_S)
    try:
        return RayRunHandle(run_id, ray.get_actor(names.controller(run_id), names.NAMESPACE))
    except ValueError as error:
        raise RunNotFound(f"no run {run_id!r} is going on in this cluster") from error
    except ray.exceptions.GetTimeoutError as error:
        raise ElasticError(
            f"Ray's control store does not say where run {run_id!r} is; its head may be away, so try again later"
        ) from error


class RayRunHandle:
    """Implements `elastic_jobs.handle.RunHandle` on Ray. Every wait has a limit; a restarting controller is waited
    for."""

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
        """Let the controller of a finished run end now; without this it stays for some minutes to be asked."""
        try:
            self._call("leave")
        except ElasticError:
            # It has ended by itself, which is what was wanted.
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
