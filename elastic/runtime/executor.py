"""Carries out what the state machine asks for. Every action that can end ends by an event; nothing here decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.errors import UsageError
from elastic.core.parity import place_parity
from elastic.core.settings import RunSettings
from elastic.core.snapshots import is_snapshot, place_replicas
from elastic.core.state import RunState, SlotPhase, WorkerPhase
from elastic.runtime import names
from elastic.runtime.agent import AgentActor, NodeFacts
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.entry import Entry
from elastic.runtime.holdings import Holdings, OnSteps, targets_of
from elastic.runtime.slots import SlotKeeper
from elastic.runtime.sweep import sweep
from elastic.runtime.wires import Wires
from elastic.runtime.worker import WorkerActor

if TYPE_CHECKING:
    from elastic.training.session import MemoryPlan

logger = logging.getLogger(__name__)

# A call to a worker that is alive returns in milliseconds; beyond this the detector's verdict counts.
_CALL_TIMEOUT_S = 10.0
# Connections that were cut come back within so long, or the generation is begun anew: one member that has not heard of
# it would keep the others for `join_timeout_s`. Less than `abort_timeout_s`, within which all of them leave.
_BEGIN_PATIENCE_S = 2.0
_ASK_AGAIN_S = 0.2
# Calls to the control store that may be waited for at the same time: starts of agents and workers.
_STORE_THREADS = 8
# So many others are tried by each node when the way between two is in doubt: all of them, on up to twice as many nodes.
_TRIED = 32


class Executor:
    """Effects of one attempt at a run. `emit` puts an event into the controller's queue."""

    def __init__(
        self,
        settings: RunSettings,
        attempt: int,
        entry: Entry,
        controller: Any,
        token: bytes,
        emit: Callable[[ev.Event], None],
        on_steps: OnSteps,
    ) -> None:
        """`on_steps` gets the step reports that come with a snapshot from memory."""
        self._settings = settings
        self._attempt = attempt
        self._entry = entry
        self._controller = controller
        self._token = token
        self._emit = emit
        self._slots = SlotKeeper(settings.run_id, attempt, settings.resources_per_worker, emit)
        self._nodes: dict[int, str] = {}
        self._worker_slot: dict[int, int] = {}
        self._workers: dict[int, Any] = {}
        self._agents: dict[str, asyncio.Task[tuple[Any, NodeFacts]]] = {}
        self._store = StoreThreads(_STORE_THREADS, "elastic-starts")
        self._wires = Wires(token, self._agent_gone)
        self.holdings = Holdings(settings.run_id, self._known_agent, settings.failures.survey_timeout_s * 0.8, on_steps)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- called by the controller ---

    def placed(self, slot: int, node: str) -> None:
        """The controller has accepted SlotPlaced: workers of this slot go to `node`."""
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
            case act.AskHold():
                work = self._each(action.workers, self._ask_hold, action.generation)
            case act.ConfirmHold():
                work = self._each(action.workers, self._confirm, action.generation, action.step, action.durable)
            case act.SurveyMemory():
                work = self._survey(action)
            case act.Note() | act.CloseIncident() | act.FinishRun():
                return
        self._spawn(work, action)

    async def reattach(self, state: RunState) -> None:
        """After a restart of the controller: find by name what the replayed state says must be there.

        What is there and not in the state was given up by the controller before, which did not live to remove it.
        """
        await asyncio.to_thread(sweep, self._settings.run_id, self._names(state))
        for slot in state.slots.values():
            if slot.phase is SlotPhase.PLACED and slot.node is not None:
                self._nodes[slot.id] = slot.node
                await self._slots.attach(slot.id, slot.node)
                # Not waited for: the node may be gone, and with it the agent that would answer.
                self._agents.setdefault(slot.node, asyncio.ensure_future(self._start_agent(slot.node)))
        for worker in state.workers.values():
            self._worker_slot[worker.id] = worker.slot
            if worker.phase is WorkerPhase.STARTING:
                continue
            name = names.worker(self._settings.run_id, self._attempt, worker.id)
            try:
                self._workers[worker.id] = await self._store.call(partial(ray.get_actor, name, names.NAMESPACE))
            except ValueError:
                self._emit(ev.WorkerDied(worker.id, "it was gone when the controller came back"))

    def _names(self, state: RunState) -> set[str]:
        run_id, attempt = self._settings.run_id, self._attempt
        nodes = {slot.node for slot in state.slots.values() if slot.node is not None}
        return {
            *(names.worker(run_id, attempt, worker) for worker in state.workers),
            *(names.slot(run_id, attempt, slot) for slot in state.slots),
            *(names.agent(run_id, attempt, node) for node in nodes),
        }

    async def close(self) -> None:
        """Wait for everything under way, then give back whatever is left. Bounded."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=_CALL_TIMEOUT_S)
        for slot in tuple(self._nodes):
            await self._release(slot)
        for node in tuple(self._agents):
            await self._drop_agent(node)
        self._wires.close()
        await self._slots.close()
        await self.sweep()
        self._store.close()

    async def sweep(self) -> None:
        """Remove what no state knows of: leftovers of a controller that was killed while it gave things back."""
        await asyncio.to_thread(sweep, self._settings.run_id)

    # --- slots, agents, workers ---

    async def _release(self, slot: int) -> None:
        node = self._nodes.pop(slot, None)
        for worker in [w for w, where in self._worker_slot.items() if where == slot]:
            await self._kill_worker(worker, node)
        await self._slots.release(slot)
        if node is not None and node not in self._nodes.values():
            await self._drop_agent(node)

    async def _drop_agent(self, node: str) -> None:
        self._wires.forget(node)
        task = self._agents.pop(node, None)
        if task is not None and task.done() and task.exception() is None:
            _kill(task.result()[0])
        elif task is not None:
            task.cancel()

    async def _start_worker(self, worker: int, slot: int) -> None:
        node, group = self._nodes.get(slot), self._slots.group(slot)
        if node is None or group is None:
            return
        self._worker_slot[worker] = slot
        try:
            agent, known = await self._agent(node)
            actor = await self._store.call(partial(self._create, worker, group))
            if self._worker_slot.get(worker) != slot:
                # Given up while it was being created, which takes as long as the control store is away.
                _kill(actor)
                return
            self._workers[worker] = actor
            facts = await actor.prepare.remote(known)
            await self._watch_over(node, agent, worker, facts["pid"])
        except (UsageError, ray.exceptions.RayError, OSError, RuntimeError) as error:
            # An error that comes from an actor is of its own class and of Ray's, and prints the actor's traceback.
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            usage = isinstance(cause, UsageError)
            self._emit(ev.WorkerStartFailed(worker, str(cause) if usage else _sentence(error), usage))
        else:
            self._emit(ev.WorkerReady(worker, facts["pid"], facts["host"]))

    async def _watch_over(self, node: str, agent: Any, worker: int, pid: int) -> None:
        try:
            await agent.watch.remote(worker, pid)
        except ray.exceptions.RayActorError:
            # The next try starts another one. Never because a worker has died: this one holds the node's memory.
            self._agents.pop(node, None)
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
        return actor_class.options(**options).remote(
            worker, self._settings.to_json(), self._entry, self._controller, self._token
        )

    async def _known_agent(self, node: str) -> tuple[Any, NodeFacts]:
        """The agent of a node that is part of the run. Raises OSError for any other node."""
        task = self._agents.get(node)
        if task is None:
            raise ConnectionError(f"node {node[:8]} is not part of the run any more")
        return await asyncio.shield(task)

    async def _agent(self, node: str) -> tuple[Any, NodeFacts]:
        """The node's agent and what it says of itself, started at the first need."""
        task = self._agents.get(node)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._start_agent(node))
            self._agents[node] = task
        return await asyncio.shield(task)

    async def _start_agent(self, node: str) -> tuple[Any, NodeFacts]:
        options = {
            "name": names.agent(self._settings.run_id, self._attempt, node),
            "namespace": names.NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,
            "max_concurrency": 100,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor_class: Any = ray.remote(AgentActor)
        arguments = (node, self._settings, self._controller, self._token)
        agent = await self._store.call(lambda: actor_class.options(**options).remote(*arguments))
        facts = await agent.join.remote()
        self._wires.watch(node, facts.memory)
        return agent, facts

    def _agent_gone(self, node: str) -> None:
        """Without its agent a node cannot take part: its workers end by themselves, if they are not gone too."""
        for slot in [slot for slot, where in self._nodes.items() if where == node]:
            self._emit(ev.SlotLost(slot, f"node {node[:8]} is gone: the process of its agent has ended"))

    async def _kill_worker(self, worker: int, node: str | None = None) -> None:
        slot = self._worker_slot.pop(worker, None)
        handle = self._workers.pop(worker, None)
        where = node or self._nodes.get(slot if slot is not None else -1)
        task = self._agents.get(where or "")
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            # By the agent too: SIGKILL ends a stopped process, which Ray's own request would not reach.
            task.result()[0].kill.remote(worker)
        if handle is not None:
            _kill(handle)

    # --- a generation ---

    async def _begin(self, action: act.BeginGeneration) -> None:
        from elastic.training.session import BatchSettings, GenerationSpec

        settings = self._settings
        batch = BatchSettings(settings.global_batch, settings.micro_batch, settings.max_steps, settings.epochs)
        first = action.members[0]
        nodes = [self._nodes.get(self._worker_slot.get(worker, -1), "") for worker in action.members]
        if action.checkpoint is not None and is_snapshot(action.checkpoint):
            # Beside everything that the members do before they need it.
            self.holdings.collect(action.generation, action.checkpoint, tuple(self._agents))
        memory = await self._memory_plans(nodes)
        rendezvous = await self._reach(first, "host_store", action.generation, patience_s=_BEGIN_PATIENCE_S)
        if rendezvous is None:
            return
        specs = [
            GenerationSpec(
                run_id=settings.run_id,
                generation=action.generation,
                rank=rank,
                world_size=len(action.members),
                seed=settings.seed,
                max_world_size=settings.scaling.max_workers,
                batch=batch,
                checkpoint=action.checkpoint,
                checkpoint_every_steps=settings.checkpoint.every_steps,
                deepspeed_config=settings.deepspeed_config,
                memory=memory[rank],
                skips=action.skips,
                anomalies=settings.anomalies,
                collective_timeout_s=settings.failures.collective_timeout_s,
            )
            for rank in range(len(action.members))
        ]
        members = zip(action.members, specs, strict=True)
        begun = (
            self._reach(worker, "begin", spec, rendezvous, patience_s=_BEGIN_PATIENCE_S) for worker, spec in members
        )
        await asyncio.gather(*begun)

    async def _memory_plans(self, nodes: Sequence[str]) -> tuple[MemoryPlan | None, ...]:
        """Where each rank's snapshots go; None for every rank where the run takes none."""
        from elastic.training.session import MemoryPlan

        memory = self._settings.memory
        if not memory.enabled:
            return (None,) * len(nodes)
        known = {node: (await self._known_agent(node))[1] for node in dict.fromkeys(nodes)}
        domains = {node: facts.domain for node, facts in known.items() if facts.domain}
        placed: Sequence[tuple[str, ...]]
        stripes: Sequence[tuple[int, ...]] = [()] * len(nodes)
        if memory.parity:
            shared = place_parity(nodes, memory.parity, domains)
            placed = [(stripe.holder,) if stripe is not None else () for stripe in shared]
            # Of one rank alone the parity is a replica.
            stripes = [stripe.ranks if stripe is not None and len(stripe.ranks) > 1 else () for stripe in shared]
        else:
            placed = place_replicas(nodes, memory.replicas, domains)
        targets = targets_of(placed, {node: facts.memory for node, facts in known.items()})
        return tuple(
            MemoryPlan(where, stripe, memory.every_steps, memory.cost_limit, memory.required)
            for where, stripe in zip(targets, stripes, strict=True)
        )

    async def _survey(self, action: act.SurveyMemory) -> None:
        reach = self._unreachable(action.nodes) if action.reach else _nothing()
        holds = self.holdings.survey(action.nodes if self._settings.memory.enabled else ())
        (found, missing), unreachable = await asyncio.gather(holds, reach)
        snapshots = tuple((snapshot.id, snapshot.step) for snapshot in found)
        self._emit(ev.MemorySurveyed(action.survey, snapshots, unreachable, missing))

    async def _unreachable(self, nodes: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Pairs (who, whom). Every node tries those that follow it, in a ring; who does not answer is silent, which is
        for the heartbeats to judge."""
        asked = []
        for place, node in enumerate(nodes):
            following = [nodes[(place + step) % len(nodes)] for step in range(1, min(len(nodes), _TRIED + 1))]
            asked.append(self._tries(node, [other for other in following if other != node]))
        return tuple(pair for pairs in await asyncio.gather(*asked) for pair in pairs)

    async def _tries(self, node: str, others: Sequence[str]) -> list[tuple[str, str]]:
        try:
            agent, _ = await self._known_agent(node)
            known = {other: (await self._known_agent(other))[1].memory for other in others}
            limit_s = self._settings.failures.survey_timeout_s * 0.8
            return [(node, other) for other in await asyncio.wait_for(agent.reach.remote(known), limit_s)]
        except (ray.exceptions.RayError, asyncio.TimeoutError, OSError) as error:
            logger.warning("node %s has not said whom it can reach: %s", node[:8], error or type(error).__name__)
            return []

    async def _end(self, worker: int, generation: int, cause: str) -> None:
        await self._call(worker, "end", generation, cause)

    async def _probe(self, worker: int) -> None:
        if await self._call(worker, "ping"):
            self._emit(ev.ProbeAnswered(worker))

    async def _ask_hold(self, worker: int, generation: int) -> None:
        promise = await self._call(worker, "hold", generation)
        if promise is not None:
            self._emit(ev.HoldAnswered(generation, worker, *promise))

    async def _confirm(self, worker: int, generation: int, step: int, durable: bool) -> None:
        await self._call(worker, "confirm", generation, step, durable)

    # --- inside ---

    async def _each(
        self, workers: tuple[int, ...], function: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> None:
        await asyncio.gather(*(function(worker, *args) for worker in workers))

    async def _call(self, worker: int, method: str, *args: Any) -> Any:
        """`_reach`, but None when it cannot be reached."""
        with contextlib.suppress(ConnectionError):
            return await self._reach(worker, method, *args)
        return None

    async def _reach(self, worker: int, method: str, *args: Any, patience_s: float = 0.0) -> Any:
        """Call a worker's method, twice and for `patience_s` if the connection breaks; None when it is dead or does not
        answer. Raises ConnectionError when it could not be asked.

        Only Ray's word that the actor is dead becomes an event here: mere unavailability is the detector's to judge.
        """
        limit, tries = time.monotonic() + patience_s, 0
        while (handle := self._workers.get(worker)) is not None:
            try:
                return await asyncio.wait_for(getattr(handle, method).remote(*args), _CALL_TIMEOUT_S)
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
            # An action that ends without its event is caught by the state machine's deadlines.
            logger.exception("%s failed", action)
            if isinstance(action, act.BeginGeneration):
                # Not waited for: nobody has been told to begin, or not everybody.
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
