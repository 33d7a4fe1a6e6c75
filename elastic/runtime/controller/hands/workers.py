"""The controller's side of the worker actors: creates them, sends them commands, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic.core import events as ev
from elastic.core.errors import Fenced
from elastic.core.run.state import Worker, WorkerPhase
from elastic.core.settings import MEMORY, RunSettings
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.ray_errors import sentence
from elastic.runtime.train_function import Entry
from elastic.runtime.worker.actor import WorkerActor

logger = logging.getLogger(__name__)

# A call to a living worker returns in milliseconds; after this limit the failure detector's verdict counts.
CALL_TIMEOUT_S = 10.0
_ASK_AGAIN_S = 0.2
# A restarted controller waits this long for its workers' answers; no decision is made meanwhile.
_MEET_LIMIT_S = 3.0


class Workers:
    """The workers of one attempt, by number. `emit` puts an event into the controller's queue.

    For each worker: 1. `assign` to a slot; 2. `create`, or `attach` after a restart of the controller; 3. `reach` and
    `call`; 4. `end`.
    """

    def __init__(
        self,
        settings: RunSettings,
        attempt: int,
        incarnation: int,
        entry: Entry,
        controller: Any,
        token: bytes,
        store: StoreThreads,
        emit: Callable[[ev.Event], None],
    ) -> None:
        self._settings = settings
        self._attempt = attempt
        self._incarnation = incarnation
        self._entry = entry
        self._controller = controller
        self._token = token
        self._store = store
        self._emit = emit
        self._slots: dict[int, int] = {}
        self._in_slot: dict[int, dict[int, None]] = {}
        # The actors of the workers that were created or found.
        self.handles: dict[int, Any] = {}

    def slot_of(self, worker: int) -> int:
        """-1 for a worker without a slot."""
        return self._slots.get(worker, -1)

    def actor_id(self, worker: int) -> str:
        """In Ray's hexadecimal form; empty for a worker without an actor."""
        handle = self.handles.get(worker)
        return str(handle._actor_id.hex()) if handle is not None else ""

    def in_slot(self, slot: int) -> list[int]:
        return list(self._in_slot.get(slot, ()))

    # --- beginning and end ---

    def assign(self, worker: int, slot: int) -> None:
        self._leave_slot(worker)
        self._slots[worker] = slot
        self._in_slot.setdefault(slot, {})[worker] = None

    async def create(self, worker: int, slot: int, group: Any, launcher: str = "") -> Any | None:
        """The actor of the worker, in the placement group of its slot. None if it does not have this slot any more: its
        creation takes as long as an outage of the control store, and the slot may be released in that time.
        `launcher`: see `NodeFacts`."""
        actor = await self._store.call(partial(self._create, worker, group, launcher))
        if self.slot_of(worker) != slot:
            _kill(actor)
            return None
        self.handles[worker] = actor
        return actor

    def _create(self, worker: int, group: Any, launcher: str) -> Any:
        resources = dict(self._settings.resources_per_worker)
        name = names.worker(self._settings.run_id, self._attempt, worker)
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, names.NAMESPACE)
        options: dict[str, Any] = {
            "name": name,
            "namespace": names.NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_concurrency": 8,
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop(MEMORY, 0) or None,
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
            # Ray adds the rest of the job's environment.
            **({"runtime_env": {"py_executable": launcher}} if launcher else {}),
        }
        actor_class: Any = ray.remote(WorkerActor)
        return actor_class.options(**options).remote(worker, self._settings, self._entry, self._controller, self._token)

    async def attach(self, worker: Worker) -> None:
        """Find the worker by name. One that is gone is reported, unless its start will be issued again."""
        self.assign(worker.id, worker.slot)
        name = names.worker(self._settings.run_id, self._attempt, worker.id)
        try:
            self.handles[worker.id] = await self._store.call(partial(ray.get_actor, name, names.NAMESPACE))
        except ValueError:
            if worker.phase is not WorkerPhase.STARTING:
                self._emit(ev.WorkerDied(worker.id, "it was gone when the controller came back"))

    async def meet(self, worker: int) -> int:
        """Introduce this controller to a worker that was found. Returns the newest generation that the worker knows of;
        0 if it does not answer in time: the failure detector finds out why."""
        try:
            call = self.handles[worker].reattach.remote(self._incarnation)
            return int(await asyncio.wait_for(call, _MEET_LIMIT_S))
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.warning("worker %d has not answered the new controller: %s", worker, sentence(error))
            return 0

    def end(self, worker: int) -> None:
        self._leave_slot(worker)
        handle = self.handles.pop(worker, None)
        if handle is not None:
            _kill(handle)

    def _leave_slot(self, worker: int) -> None:
        slot = self._slots.pop(worker, -1)
        there = self._in_slot.get(slot, {})
        there.pop(worker, None)
        if not there:
            self._in_slot.pop(slot, None)

    # --- commands ---

    async def call(self, worker: int, method: str, *args: Any, retry_s: float = 0.0) -> Any:
        """`reach`, but None when the worker cannot be reached."""
        with contextlib.suppress(ConnectionError):
            return await self.reach(worker, method, *args, retry_s=retry_s)
        return None

    async def reach(self, worker: int, method: str, *args: Any, retry_s: float = 0.0) -> Any:
        """Send a worker a command, twice and for `retry_s` if the connection breaks; None when the worker is dead, does
        not answer, or obeys a newer controller. Raises ConnectionError when it could not be reached.

        Only Ray's statement that the actor is dead becomes an event here; unavailability is judged by the failure
        detector.
        """
        limit, tries = time.monotonic() + retry_s, 0
        while (handle := self.handles.get(worker)) is not None:
            try:
                call = handle.command.remote(self._incarnation, method, *args)
                return await asyncio.wait_for(call, CALL_TIMEOUT_S)
            except Fenced as error:
                # This process may be unable to reach the journal, which would tell it so.
                logger.warning("worker %d refuses %s: %s", worker, method, error)
                return None
            except ray.exceptions.ActorUnavailableError as error:
                tries += 1
                logger.debug("worker %d did not take %s (try %d): %s", worker, method, tries, error)
                if tries > 1 and time.monotonic() >= limit:
                    raise ConnectionError(f"worker {worker} cannot be reached and has not taken {method!r}") from error
                if tries > 1:
                    await asyncio.sleep(_ASK_AGAIN_S)
            except ray.exceptions.ActorDiedError as error:
                self._emit(ev.WorkerDied(worker, sentence(error)))
                return None
            except asyncio.TimeoutError:
                logger.warning("worker %d has not answered %s for %.0f s", worker, method, CALL_TIMEOUT_S)
                return None
        return None


def _kill(handle: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(handle, no_restart=True)
