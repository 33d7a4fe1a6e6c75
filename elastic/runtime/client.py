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
from elastic.runtime.controller import ControllerActor
from elastic.runtime.entry import Entry

# A controller that is being restarted answers again within seconds; one that stays away longer is lost.
_UNREACHABLE_S = 90.0
_CALL_TIMEOUT_S = 30.0


def connect(address: str | None, *, show_prints: bool = False) -> None:
    """Join the cluster at `address` (None: Ray's own rules). Raises UsageError when there is none."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, namespace=names.NAMESPACE, log_to_driver=show_prints, logging_level=logging.ERROR)
    except (ConnectionError, ray.exceptions.RayError, RuntimeError) as error:
        raise UsageError(f"no Ray cluster answers at {address!r}: {error}") from error


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
    name = names.controller(settings.run_id)
    actor_class: Any = ray.remote(ControllerActor)
    try:
        actor = actor_class.options(
            name=name, namespace=names.NAMESPACE, lifetime="detached", max_restarts=-1, max_concurrency=1000,
            # Ray gives no heed to a soft affinity of an actor that asks for nothing (seen, 2.60).
            num_cpus=0, memory=1_000_000, scheduling_strategy=_placement(),
        ).remote(settings.to_json(), entry, secrets.token_bytes(32))  # fmt: skip
    except ValueError as error:
        raise UsageError(
            f"run {settings.run_id!r} is going on already: follow it with `elastic watch {settings.run_id}`"
        ) from error
    return RayRunHandle(settings.run_id, actor)


def _placement() -> NodeAffinitySchedulingStrategy:
    """On this process's node where Ray can, so that the loss of a worker's node is not the loss of the controller too.

    Where all nodes are on one machine a driver cannot tell which one is its own; there the head is the one that no
    fault may take away, since the cluster ends with it.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if len({node["NodeManagerAddress"] for node in nodes}) == 1:
        head = next((n["NodeID"] for n in nodes if "node:__internal_head__" in n["Resources"]), None)
        if head is not None:
            return NodeAffinitySchedulingStrategy(head, soft=False)
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)


def attach(run_id: str, address: str | None) -> RayRunHandle:
    """A handle of a run that goes on. Raises RunNotFound."""
    connect(address)
    try:
        return RayRunHandle(run_id, ray.get_actor(names.controller(run_id), names.NAMESPACE))
    except ValueError as error:
        raise RunNotFound(f"no run {run_id!r} is going on in this cluster") from error


class RayRunHandle:
    """Implements `jobs.handle.RunHandle` on Ray. Every wait has a limit; a restarting controller is waited for."""

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
