"""Carries out the actions of the state machine. An action's outcome is an event; no decision is made here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.errors import Fenced, UsageError
from elastic.core.run.state import RunState, SlotPhase, WorkerPhase
from elastic.core.settings import RunSettings
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.controller.hands.agents import Agents, OnAgent
from elastic.runtime.controller.hands.generation_specs import generation_specs, memory_plans
from elastic.runtime.controller.hands.placement_groups import SlotKeeper
from elastic.runtime.controller.hands.snapshot_directory import OnSteps, SnapshotDirectory
from elastic.runtime.orphans import remove_orphans
from elastic.runtime.train_function import Entry
from elastic.runtime.worker.actor import WorkerActor

if TYPE_CHECKING:
    from elastic.core.generation_spec import MemoryPlan

logger = logging.getLogger(__name__)

# A call to a living worker returns in milliseconds; after this limit the failure detector's verdict counts.
_CALL_TIMEOUT_S = 10.0
# A broken connection must recover within this time, or the generation is begun again: a member that was not told to
# begin would block the others for `join_timeout_s`. Less than `abort_timeout_s`, within which all members leave.
_BEGIN_RETRY_S = 2.0
_ASK_AGAIN_S = 0.2
# A restarted controller waits this long for its workers' answers; no decision is made meanwhile.
_MEET_LIMIT_S = 3.0
# Concurrent calls to the control store: starts of agents and workers.
_STORE_THREADS = 8


class Executor:
    """Effects of one attempt at a run. `emit` puts an event into the controller's queue."""

    def __init__(
        self,
        settings: RunSettings,
        attempt: int,
        incarnation: int,
        entry: Entry,
        controller: Any,
        token: bytes,
        emit: Callable[[ev.Event], None],
        on_steps: OnSteps,
        on_agent: OnAgent,
        content_after: Callable[[int], Mapping[int, int]] = lambda step: {},
    ) -> None:
        """`on_steps` gets the step reports that come with a snapshot from memory; `on_agent` see `Agents`;
        `content_after` see `StepContents.after`."""
        self._settings = settings
        self._attempt = attempt
        self._incarnation = incarnation
        self._entry = entry
        self._controller = controller
        self._token = token
        self._emit = emit
        self._content_after = content_after
        self._slots = SlotKeeper(settings.run_id, attempt, settings.resources_per_worker, emit)
        self._nodes: dict[int, str] = {}
        self._worker_slot: dict[int, int] = {}
        self._workers: dict[int, Any] = {}
        self._store = StoreThreads(_STORE_THREADS, "elastic-starts")
        self._agents = Agents(settings, attempt, controller, token, self._store, on_agent)
        self.snapshots = SnapshotDirectory(
            settings.run_id, self._agents.of, settings.failures.survey_timeout_s * 0.8, on_steps
        )
        self._tasks: set[asyncio.Task[None]] = set()

    # --- called by the controller ---

    def placed(self, slot: int, node: str) -> None:
        """SlotPlaced was accepted: start workers of this slot on `node`."""
        self._nodes[slot] = node

    def perform(self, action: act.Action) -> None:
        """Start carrying out the action; returns at once."""
        work: Coroutine[Any, Any, None]
        match action:
            case act.RequestSlot():
                work = self._slots.request(action.slot, action.workers, action.avoid)
            case act.ReleaseSlot():
                work = self._release(action.slot)
            case act.StartWorker():
                work = self._start_worker(action.worker, action.slot)
            case act.KillWorker():
                work = self._kill_worker(action.worker)
            case act.BeginGeneration():
                work = self._begin(action)
            case act.EndGeneration():
                work = self._each(action.workers, self._end, action.generation, action.cause)
            case act.Probe():
                work = self._each(action.workers, self._probe)
            case act.ProposeStop():
                work = self._each(action.workers, self._propose_stop, action.generation)
            case act.CommitStop():
                work = self._each(action.workers, self._commit_stop, action)
            case act.QuerySnapshots():
                work = self._survey(action)
            case act.Note() | act.CloseIncident() | act.FinishRun():
                return
        self._spawn(work, action)

    async def reattach(self, state: RunState, incarnation: int) -> ev.ControllerRestarted:
        """After a restart of the controller: find by name the actors and placement groups of the replayed state.

        Actors that exist but are not in the replayed state are leftovers: the previous controller died before it could
        remove them, or before it could journal their creation.
        """
        strangers = await asyncio.to_thread(remove_orphans, self._settings.run_id, self._names(state))
        for slot in state.fleet.slots.values():
            if slot.phase is SlotPhase.PLACED and slot.node is not None:
                self._nodes[slot.id] = slot.node
                await self._slots.attach(slot.id, slot.node)
                self._agents.attach(slot.node)
        for worker in state.fleet.workers.values():
            self._worker_slot[worker.id] = worker.slot
            name = names.worker(self._settings.run_id, self._attempt, worker.id)
            try:
                self._workers[worker.id] = await self._store.call(partial(ray.get_actor, name, names.NAMESPACE))
            except ValueError:
                if worker.phase is not WorkerPhase.STARTING:
                    self._emit(ev.WorkerDied(worker.id, "it was gone when the controller came back"))
        there = [
            w.id for w in state.fleet.workers.values() if w.phase is not WorkerPhase.STARTING and w.id in self._workers
        ]
        known = await asyncio.gather(*(self._meet(worker, incarnation) for worker in there))
        place = self._settings.run_id, self._attempt, strangers
        return ev.ControllerRestarted(
            incarnation, max(known, default=0), names.next_slot(*place), names.next_worker(*place)
        )

    async def _meet(self, worker: int, incarnation: int) -> int:
        """The newest generation that the worker knows of; 0 if it does not answer in time. The failure detector
        finds out why: the process or its node may be gone or frozen."""
        try:
            return int(await asyncio.wait_for(self._workers[worker].reattach.remote(incarnation), _MEET_LIMIT_S))
        except (ray.exceptions.RayError, asyncio.TimeoutError) as error:
            logger.warning("worker %d has not answered the new controller: %s", worker, _sentence(error))
            return 0

    def _names(self, state: RunState) -> set[str]:
        run_id, attempt = self._settings.run_id, self._attempt
        nodes = {slot.node for slot in state.fleet.slots.values() if slot.node is not None}
        return {
            *(names.worker(run_id, attempt, worker) for worker in state.fleet.workers),
            *(names.slot(run_id, attempt, slot) for slot in state.fleet.slots),
            *(names.agent(run_id, attempt, node) for node in nodes),
        }

    async def close(self) -> None:
        """Wait for running actions, then release everything that is left. Bounded."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=_CALL_TIMEOUT_S)
        for slot in tuple(self._nodes):
            await self._release(slot)
        self._agents.close()
        await self._slots.close()
        await self.remove_orphans()
        self._store.close()

    async def remove_orphans(self) -> None:
        """Remove leftovers of a controller that was killed while it released resources."""
        await asyncio.to_thread(remove_orphans, self._settings.run_id)

    # --- slots, agents, workers ---

    async def _release(self, slot: int) -> None:
        node = self._nodes.pop(slot, None)
        for worker in [w for w, where in self._worker_slot.items() if where == slot]:
            await self._kill_worker(worker, node)
        await self._slots.release(slot)
        if node is not None and node not in self._nodes.values():
            self._agents.drop(node)

    async def _start_worker(self, worker: int, slot: int) -> None:
        node, group = self._nodes.get(slot), self._slots.group(slot)
        if node is None or group is None:
            return
        self._worker_slot[worker] = slot
        try:
            agent, known = await self._agents.started(node)
            actor = await self._store.call(partial(self._create, worker, group))
            if self._worker_slot.get(worker) != slot:
                # Released during its creation, which takes as long as an outage of the control store.
                _kill(actor)
                return
            self._workers[worker] = actor
            facts = await actor.prepare.remote(known)
            await self._watch_over(node, agent, worker, facts["pid"])
        except (UsageError, ray.exceptions.RayError, OSError, RuntimeError) as error:
            # An error raised in an actor has both its own class and Ray's, and prints the actor's traceback.
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            usage = isinstance(cause, UsageError)
            self._emit(ev.WorkerStartFailed(worker, str(cause) if usage else _sentence(error), usage))
        else:
            self._emit(ev.WorkerReady(worker, facts["pid"], facts["host"]))

    async def _watch_over(self, node: str, agent: Any, worker: int, pid: int) -> None:
        try:
            await agent.watch.remote(self._incarnation, worker, pid)
        except ray.exceptions.RayActorError:
            # The next try starts another agent. Never because of a dead worker: the agent holds the node's snapshots.
            self._agents.forget(node)
            raise

    def _create(self, worker: int, group: Any) -> Any:
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
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group=group),
        }
        actor_class: Any = ray.remote(WorkerActor)
        return actor_class.options(**options).remote(worker, self._settings, self._entry, self._controller, self._token)

    async def _kill_worker(self, worker: int, node: str | None = None) -> None:
        slot = self._worker_slot.pop(worker, None)
        handle = self._workers.pop(worker, None)
        where = node or self._nodes.get(slot if slot is not None else -1)
        agent = self._agents.at_hand(where or "")
        if agent is not None:
            # The agent kills it too: SIGKILL ends a stopped process, which does not react to Ray's request.
            agent.kill.remote(self._incarnation, worker)
        if handle is not None:
            _kill(handle)

    # --- a generation ---

    async def _begin(self, action: act.BeginGeneration) -> None:
        first = action.members[0]
        nodes = [self._nodes.get(self._worker_slot.get(worker, -1), "") for worker in action.members]
        if action.checkpoint is not None and is_snapshot(action.checkpoint):
            # Concurrently with what the members do before they need the snapshot.
            self.snapshots.collect(action.generation, action.checkpoint, self._agents.nodes)
        plans: Sequence[MemoryPlan | None] = (None,) * len(nodes)
        if self._settings.snapshots.enabled:
            known = {node: (await self._agents.of(node))[1] for node in dict.fromkeys(nodes)}
            plans = memory_plans(self._settings, nodes, known)
        rendezvous = await self._reach(first, "host_store", action.generation, retry_s=_BEGIN_RETRY_S)
        if rendezvous is None:
            return
        specs = generation_specs(self._settings, action, plans, self._content_after(action.step))
        members = zip(action.members, specs, strict=True)
        begun = (self._reach(worker, "begin", spec, rendezvous, retry_s=_BEGIN_RETRY_S) for worker, spec in members)
        await asyncio.gather(*begun)

    async def _survey(self, action: act.QuerySnapshots) -> None:
        reach = self._agents.unreachable(action.nodes) if action.reach else _nothing()
        holds = self.snapshots.survey(action.nodes if self._settings.snapshots.enabled else ())
        (found, missing), unreachable = await asyncio.gather(holds, reach)
        snapshots = tuple((snapshot.id, snapshot.step) for snapshot in found)
        self._emit(ev.SnapshotsReported(action.survey, snapshots, unreachable, missing))

    async def _end(self, worker: int, generation: int, cause: str) -> None:
        await self._call(worker, "end", generation, cause, retry_s=self._settings.failures.abort_timeout_s)

    async def _probe(self, worker: int) -> None:
        if await self._call(worker, "ping"):
            self._emit(ev.ProbeAnswered(worker))

    async def _propose_stop(self, worker: int, generation: int) -> None:
        promise = await self._call(worker, "propose_stop", generation, retry_s=self._stop_retry_s)
        if promise is not None:
            self._emit(ev.StopPromised(generation, worker, *promise))

    async def _commit_stop(self, worker: int, stop: act.CommitStop) -> None:
        args = (stop.generation, stop.step, stop.durable, stop.last)
        await self._call(worker, "commit_stop", *args, retry_s=self._stop_retry_s)

    # --- inside ---

    async def _each(
        self, workers: tuple[int, ...], function: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        await asyncio.gather(*(function(worker, *args) for worker in workers))

    @property
    def _stop_retry_s(self) -> float:
        """A worker that cannot be reached for a moment must not cost a planned end its whole time limit."""
        return self._settings.failures.drain_timeout_s / 2

    async def _call(self, worker: int, method: str, *args: Any, retry_s: float = 0.0) -> Any:
        """`_reach`, but None when the worker cannot be reached."""
        with contextlib.suppress(ConnectionError):
            return await self._reach(worker, method, *args, retry_s=retry_s)
        return None

    async def _reach(self, worker: int, method: str, *args: Any, retry_s: float = 0.0) -> Any:
        """Give a worker a command, twice and for `retry_s` if the connection breaks; None when the worker is dead, does
        not answer, or obeys a newer controller. Raises ConnectionError when it could not be reached.

        Only Ray's statement that the actor is dead becomes an event here; unavailability is judged by the failure
        detector.
        """
        limit, tries = time.monotonic() + retry_s, 0
        while (handle := self._workers.get(worker)) is not None:
            try:
                call = handle.command.remote(self._incarnation, method, *args)
                return await asyncio.wait_for(call, _CALL_TIMEOUT_S)
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
                self._emit(ev.WorkerDied(worker, _sentence(error)))
                return None
            except asyncio.TimeoutError:
                logger.warning("worker %d has not answered %s for %.0f s", worker, method, _CALL_TIMEOUT_S)
                return None
        return None

    def _spawn(self, work: Coroutine[Any, Any, None], action: act.Action) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work, action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[Any, Any, None], action: act.Action) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # The state machine's deadlines cover an action that ends without its event.
            logger.exception("%s failed", action)
            if isinstance(action, act.BeginGeneration):
                # Reported at once instead of waiting for a deadline: not all members were told to begin.
                told = f"the generation could not be begun: {_sentence(error)}"
                self._emit(ev.CollectiveFailed(action.generation, action.members[0], action.step, told))


async def _nothing() -> tuple[Any, ...]:
    return ()


def _kill(handle: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(handle, no_restart=True)


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:500]
