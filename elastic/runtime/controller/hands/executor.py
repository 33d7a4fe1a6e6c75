"""Carries out the actions of the state machine. An action's outcome is an event; no decision is made here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import Copies, copies_of, is_snapshot
from elastic.core.errors import UsageError
from elastic.core.run.state import RunState, SlotPhase, WorkerPhase
from elastic.core.settings import RunSettings
from elastic.runtime import names
from elastic.runtime.control_store import StoreThreads
from elastic.runtime.controller.hands.agents import Agents, OnAgent
from elastic.runtime.controller.hands.commands import Commands, Heard
from elastic.runtime.controller.hands.generation_specs import memory_plans, shared_spec
from elastic.runtime.controller.hands.node_measures import NodeMeasures
from elastic.runtime.controller.hands.placement_groups import SlotKeeper
from elastic.runtime.controller.hands.snapshot_directory import OnSteps, SnapshotDirectory
from elastic.runtime.controller.hands.workers import CALL_TIMEOUT_S, Workers
from elastic.runtime.messages import NodeFacts
from elastic.runtime.orphans import remove_orphans
from elastic.runtime.ray_errors import sentence
from elastic.runtime.train_function import Entry

if TYPE_CHECKING:
    from elastic.core.generation_spec import MemoryPlan

logger = logging.getLogger(__name__)

# A broken connection must recover within this time, or the generation is begun again: a member that was not told to
# begin would block the others for `join_timeout_s`. Less than `abort_timeout_s`, within which all members leave.
_BEGIN_RETRY_S = 2.0
# Concurrent calls to the control store: starts of agents and workers.
_STORE_THREADS = 8
# See `core.events.WorkerReady`.
_HOME = 2


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
        relay_of: Callable[[str], str | None] = lambda node: None,
        home: str = "",
    ) -> None:
        """`on_steps` gets the step reports that come with a snapshot from memory; `on_agent` see `Agents`;
        `content_after` see `StepContents.after`; `relay_of` see `Commands`; `home` is the controller's node."""
        self._settings = settings
        self._attempt = attempt
        self._incarnation = incarnation
        self._emit = emit
        self._content_after = content_after
        self._home = home
        self._slots = SlotKeeper(settings.run_id, attempt, settings.resources_per_worker, emit)
        self._nodes: dict[int, str] = {}
        self._store = StoreThreads(_STORE_THREADS, "elastic-starts")
        self._agents = Agents(settings, attempt, incarnation, controller, token, self._store, on_agent)
        self._measures = NodeMeasures(self._agents, emit)
        self._workers = Workers(settings, attempt, incarnation, entry, controller, token, self._store, emit)
        patience_s = settings.failures.probe_timeout_s
        self._commands = Commands(incarnation, self._agents, self._node_of, relay_of, emit, patience_s)
        self.snapshots = SnapshotDirectory(
            settings.run_id,
            self._agents.of,
            partial(self._commands.ask, self._agents.ask),
            settings.failures.survey_timeout_s * 0.8,
            on_steps,
        )
        self.actor_id = self._workers.actor_id
        self._tasks: set[asyncio.Task[None]] = set()

    # --- called by the controller ---

    def placed(self, slot: int, node: str) -> None:
        """SlotPlaced was accepted: start workers of this slot on `node`."""
        self._nodes[slot] = node

    def agent_on(self, node: str) -> Any | None:
        """The handle of the node's agent; None unless it has started."""
        return self._agents.at_hand(node)

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
                limit_s = self._settings.failures.abort_timeout_s
                work = self._tell(action.workers, "end", limit_s, action.generation, action.cause)
            case act.Probe():
                work = self._probe(action.workers)
            case act.ProposeStop():
                work = self._propose_stop(action)
            case act.CommitStop():
                work = self._tell(action.workers, "commit_stop", self._stop_retry_s,
                                  action.generation, action.step, action.durable, action.last)  # fmt: skip
            case act.MeasureNode():
                work = self._measures.measure(action)
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
            await self._workers.attach(worker)
        found = self._workers.handles
        there = [w.id for w in state.fleet.workers.values() if w.phase is not WorkerPhase.STARTING and w.id in found]
        known = await asyncio.gather(*map(self._workers.meet, there))
        place = self._settings.run_id, self._attempt, strangers
        return ev.ControllerRestarted(
            incarnation, max(known, default=0), names.next_slot(*place), names.next_worker(*place)
        )

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
            await asyncio.wait(tuple(self._tasks), timeout=CALL_TIMEOUT_S)
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
        for worker in self._workers.in_slot(slot):
            await self._kill_worker(worker, node)
        await self._slots.release(slot)
        if node is not None and node not in self._nodes.values():
            self._agents.drop(node)

    async def _start_worker(self, worker: int, slot: int) -> None:
        node, group = self._nodes.get(slot), self._slots.group(slot)
        if node is None or group is None:
            return
        self._workers.assign(worker, slot)
        try:
            agent, known, actor = await self._begun(worker, slot, node, group)
            if actor is None or self._workers.slot_of(worker) != slot:
                return
            # A worker that is alone on its node has nobody's reports to be joined with.
            relay = agent if self._settings.scaling.workers_per_slot > 1 else None
            facts = await actor.prepare.remote(known, relay)
            await self._watch_over(node, agent, worker, facts["pid"], actor)
        except (UsageError, ray.exceptions.RayError, OSError, RuntimeError) as error:
            # An error raised in an actor has both its own class and Ray's, and prints the actor's traceback.
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            usage = isinstance(cause, UsageError)
            # Before the next try, which would be given the same one.
            await self._agents.forget_if_dead(node)
            self._emit(ev.WorkerStartFailed(worker, str(cause) if usage else sentence(error), usage))
        else:
            # The loss of this node costs more than that of any other already.
            lasting = _HOME if node == self._home else known.lasting
            self._emit(ev.WorkerReady(worker, facts["pid"], facts["host"], lasting))

    async def _begun(self, worker: int, slot: int, node: str, group: Any) -> tuple[Any, NodeFacts, Any | None]:
        """The node's agent, its facts, and the worker's actor."""
        if self._settings.fork_workers or self._settings.calibration.policy != "off":
            # The agent says how a worker is forked; a node is measured while it is idle.
            agent, known = await self._agents.started(node)
            await self._measures.ended(node)
            return agent, known, await self._workers.create(worker, slot, group, known.launcher)
        actor = await self._workers.create(worker, slot, group)
        if actor is not None:
            # It imports while the agent of a new node does.
            actor.preload.remote()
        return *await self._agents.started(node), actor

    async def _watch_over(self, node: str, agent: Any, worker: int, pid: int, actor: Any) -> None:
        try:
            await agent.watch.remote(self._incarnation, worker, pid, actor)
        except ray.exceptions.RayActorError:
            # The next try starts another agent. Never because of a dead worker: the agent holds the node's snapshots.
            self._agents.forget(node)
            raise

    async def _kill_worker(self, worker: int, node: str | None = None) -> None:
        agent = self._agents.at_hand(node or self._node_of(worker))
        if agent is not None:
            # The agent kills it too: SIGKILL ends a stopped process, which does not react to Ray's request.
            agent.kill.remote(self._incarnation, worker)
        self._workers.end(worker)

    def _node_of(self, worker: int) -> str:
        return self._nodes.get(self._workers.slot_of(worker), "")

    # --- a generation ---

    async def _begin(self, action: act.BeginGeneration) -> None:
        first = action.members[0]
        nodes = [self._node_of(worker) for worker in action.members]
        if action.checkpoint is not None and is_snapshot(action.checkpoint):
            # Concurrently with what the members do before they need the snapshot.
            asked = self._agents.without_new(self._agents.nodes)
            self.snapshots.collect(action.generation, action.checkpoint, asked)
        plans: Sequence[MemoryPlan | None] = (None,) * len(nodes)
        if self._settings.snapshots.enabled:
            known = {node: (await self._agents.of(node))[1] for node in dict.fromkeys(nodes)}
            plans = memory_plans(self._settings, nodes, known, action.axes)
        rendezvous = await self._workers.reach(first, "host_store", action.generation, retry_s=_BEGIN_RETRY_S)
        if rendezvous is None:
            return
        spec = shared_spec(self._settings, action, self._content_after(action.step), nodes)
        own = dict(zip(action.members, enumerate(plans), strict=True))
        await self._commands.tell(self._workers.reach, "begin", (spec, rendezvous), own, _BEGIN_RETRY_S)

    async def _survey(self, action: act.QuerySnapshots) -> None:
        holding = self._agents.without_new(action.nodes) if self._settings.snapshots.enabled else ()
        # A new node may be the one that others cannot reach.
        reach = self._agents.unreachable(action.nodes) if action.reach else _nothing()
        holds = self.snapshots.survey(holding)
        (found, missing), unreachable = await asyncio.gather(holds, reach)
        snapshots = tuple((snapshot.id, snapshot.step) for snapshot in found)
        copies = copies_of(found[0]) if found else Copies()
        self._emit(ev.SnapshotsReported(action.survey, snapshots, unreachable, missing, copies.ranks, copies.nodes))

    async def _probe(self, workers: Sequence[int]) -> None:
        """Each by a call of its own: an agent that is late must not be taken for its workers."""
        await asyncio.gather(*map(self._probe_one, workers))

    async def _probe_one(self, worker: int) -> None:
        if await self._workers.call(worker, "ping"):
            self._emit(ev.ProbeAnswered(worker))

    async def _propose_stop(self, action: act.ProposeStop) -> None:
        def heard(promises: Mapping[int, tuple[int, bool] | None]) -> None:
            for worker, promise in promises.items():
                if promise is not None:
                    self._emit(ev.StopPromised(action.generation, worker, *promise))

        await self._tell(action.workers, "propose_stop", self._stop_retry_s, action.generation, heard=heard)

    async def _tell(
        self, workers: Sequence[int], name: str, limit_s: float, *shared: Any, heard: Heard | None = None
    ) -> None:
        """A command that has the same arguments for all."""
        own: dict[int, tuple[Any, ...]] = dict.fromkeys(workers, ())
        await self._commands.tell(self._workers.call, name, shared, own, limit_s, heard)

    # --- inside ---

    @property
    def _stop_retry_s(self) -> float:
        """A worker that cannot be reached for a moment must not cost a planned end its whole time limit."""
        return self._settings.failures.drain_timeout_s / 2

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
                told = f"the generation could not be begun: {sentence(error)}"
                self._emit(ev.CollectiveFailed(action.generation, action.members[0], action.step, told))


async def _nothing() -> tuple[Any, ...]:
    return ()
