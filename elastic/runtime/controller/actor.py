"""The controller actor: it serves clients, agents and workers, and runs the control loop until the run has ended.

It makes no decision itself and holds no tensor; its knowledge of the run is in `control_loop.py`. A restarted
controller replays the journal and continues, while the workers keep training.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import ray

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import events as ev
from elastic.core.errors import ElasticError, Fenced
from elastic.core.policy.priority_sharing import Claim
from elastic.core.run import machine
from elastic.core.run.membership import expected_place
from elastic.core.run.phase import Finished, Training
from elastic.core.run.state import WorkerPhase
from elastic.core.secrets import secret_values
from elastic.core.settings import RunSettings
from elastic.observe.journal import JournalWriter
from elastic.observe.records import run_began, run_ended
from elastic.observe.sink_files import file_sinks
from elastic.observe.sinks import RunInfo, Sinks
from elastic.runtime import handed_environment
from elastic.runtime.controller.collector import collect_seldom
from elastic.runtime.controller.committer import Committer
from elastic.runtime.controller.control_loop import ControlLoop
from elastic.runtime.controller.exits import end_actor, end_fenced, restart_process
from elastic.runtime.controller.hands.executor import Executor
from elastic.runtime.controller.hands.relays import Relays
from elastic.runtime.controller.records import Records
from elastic.runtime.controller.replay import Replayed, replay
from elastic.runtime.controller.replay_state import reader
from elastic.runtime.controller.senses.agent_links import AgentLinks
from elastic.runtime.controller.senses.capacity_monitor import CapacityMonitor
from elastic.runtime.controller.senses.drain_monitor import DrainMonitor
from elastic.runtime.controller.train_page import TrainPage
from elastic.runtime.messages import Assembled, Beat, BeatReply, Item, NodeReply, NodeReports, Post, QuietNodes, Reply
from elastic.runtime.niceness import raise_priority
from elastic.runtime.storage_retry import retried
from elastic.runtime.train_function import Entry
from elastic.runtime.versions import versions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Releasing the run's resources takes a second; longer only while Ray's control store is unavailable.
_CLOSE_LIMIT_S = 30.0
# How long the end of a run waits for all of its sinks together.
_SINKS_LIMIT_S = 5.0
# Noted records are written within this time even without events: steps, in a run that only trains.
_WRITE_S = 2.0
# Records of a decision wait this long for the next events, to be written with them.
_QUIET_S = 0.1
# The finished controller stays reachable for this long, so that watchers can fetch the result.
_LINGER_S = 600.0


class ControllerActor:
    """Asyncio actor; detached, named, restarted by Ray for as long as the run continues.

    Clients call `progress`, `wait_step`, `wait_end`, `stop`, `leave`; agents call `beat`, `quiet` and `node_reports`;
    workers call `deliver`, by their agents `deliver_all`; controllers of other runs call `claim`.
    """

    def __init__(self, settings: RunSettings, entry: Entry, token: bytes, on_train_page: bool = False) -> None:
        raise_priority()
        collect_seldom()
        # Of storage, and what errors of user code must not show.
        handed_environment.take()
        self._settings = settings
        self._entry = entry
        # Authenticates the parts of this run to each other; an argument, so that a restarted controller gets it again.
        self._token = token
        self._on_train_page = on_train_page
        self._page: TrainPage | None = None
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        # Set while this actor holds no resources in the cluster.
        self._given_back = asyncio.Event()
        self._given_back.set()
        self._stepped = asyncio.Condition()
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._records = Records()
        self._result: dict[str, Any] | None = None
        # Why the start failed.
        self._failed: str | None = None
        self._capacity: CapacityMonitor | None = None
        self._relays = Relays(settings.failures.nodes_per_relay)
        self._main = asyncio.get_running_loop().create_task(self._run(_was_restarted()))

    # --- for clients ---

    async def progress(self) -> dict[str, Any]:
        """The live figures; see `elastic_jobs.running.handle.RunHandle.progress`."""
        await self._begun()
        status = self._result["status"] if self._result else "running"
        return {**self._loop.progress(), "status": status, "controller_pid": os.getpid()}

    async def wait_step(self, step: int, timeout_s: float) -> bool:
        await self._begun()
        telemetry = self._loop.telemetry
        try:
            async with self._stepped:
                await asyncio.wait_for(
                    self._stepped.wait_for(lambda: telemetry.step >= step or self._result is not None), timeout_s
                )
        except asyncio.TimeoutError:
            return False
        return telemetry.step >= step

    async def wait_end(self, timeout_s: float) -> dict[str, Any] | None:
        if self._ended.is_set():
            # A wait of 0 s would not check the event.
            return self._result
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            return None
        return self._result

    async def stop(self, reason: str) -> None:
        self._events.put_nowait(ev.StopRequested(reason))

    async def leave(self) -> None:
        """The result was fetched: this actor may end."""
        if self._result is not None:
            asyncio.get_running_loop().create_task(self._leave())

    # --- for the controllers of other runs ---

    async def claim(self) -> Claim | None:
        """The slots that this run holds and needs; None after the end, and before the first look at the cluster."""
        return self._capacity.claim if self._capacity is not None and self._result is None else None

    # --- for agents and workers ---

    async def beat(self, beat: Beat) -> BeatReply:
        """One node's heartbeat. An agent whose node is not part of the run ends its workers."""
        await self._ready.wait()
        if self._result is not None:
            return BeatReply(False)
        now, fleet = self._loop.clock.now(), self._loop.state.fleet
        if not self._loop.heartbeats.beat(beat, now):
            return BeatReply(False)
        relay = self._relays.of(beat.node, fleet, now)
        return BeatReply(True, self._executor.agent_on(relay) if relay is not None else None)

    async def quiet(self, beats: QuietNodes) -> tuple[str, ...]:
        """Heartbeats of several nodes, passed on by the agent of one. Returns those that are not part of the run."""
        await self._ready.wait()
        if self._result is not None:
            return beats.nodes
        return self._loop.heartbeats.quiet(beats, self._loop.clock.now())

    async def deliver(self, worker: int, items: Sequence[Item], heard: int | None) -> Reply:
        """A worker's messages, in order. A removed worker gets a fenced reply, and its messages are ignored.

        `heard` is the incarnation of the controller that the worker knows. If that is another one, the batch is not
        taken: the worker may have older messages for this controller and sends them first.
        """
        await self._begun()
        return self._loop.answer(worker, items, heard, self._journal.incarnation)

    async def deliver_all(self, posts: Mapping[int, Post]) -> dict[int, Reply]:
        """`deliver` for workers whose agents have joined their messages."""
        await self._begun()
        return self._loop.answer_all(posts, self._journal.incarnation)

    async def node_reports(self, reports: NodeReports) -> NodeReply | None:
        """Step reports of some nodes' workers, joined. None where they are not taken: each worker then sends its own by
        `deliver`, which says why if it has to."""
        await self._begun()
        incarnation, loop = self._journal.incarnation, self._loop
        if reports.heard != incarnation or not loop.node_reports(reports, loop.clock.now()):
            return None
        return NodeReply(incarnation, loop.all_durable(reports.workers))

    async def snapshot(self, identifier: str) -> Assembled:
        """What a worker needs to restore a snapshot from memory. Raises IntegrityError or StorageError."""
        await self._begun()
        return await self._executor.snapshots.wait_for(identifier)

    async def passes(self) -> Sequence[Any]:
        """What forward passes of training look like, for a worker that is to join; nothing where nobody has told."""
        await self._begun()
        return self._loop.passes

    async def recording(self) -> bytes | None:
        """What the collectives of the others' set-up gave, for a worker that is to join; None: not told yet."""
        await self._begun()
        return self._loop.recording

    async def expected_place(self, worker: int) -> tuple[int, int] | None:
        """(rank, world size) that a worker may be told before it joins."""
        await self._begun()
        return expected_place(self._loop.state, worker)

    async def setting_up(self, worker: int) -> bool:
        """A worker's set-up takes long, and makes progress. May it go on before the worker is ready? Where others train
        nobody waits for it."""
        await self._begun()
        trains = isinstance(self._loop.state.phase, Training)
        if trains:
            self._events.put_nowait(ev.WorkerSettingUp(worker))
        return trains

    async def _begun(self) -> None:
        """Wait for the start. Raises ElasticError with its cause where it has failed."""
        await self._ready.wait()
        if self._failed is not None:
            raise ElasticError(f"the controller of run {self._settings.run_id!r} did not start: {self._failed}")

    def _step_done(self) -> None:
        asyncio.get_running_loop().create_task(self._tell_step())

    async def _tell_step(self) -> None:
        async with self._stepped:
            self._stepped.notify_all()

    # --- the loop ---

    async def _run(self, reconstructed: bool) -> None:
        try:
            await self._start(reconstructed)
            loop, emit = self._loop, self._events.put_nowait
            known = {node: notice.deadline for node, notice in loop.state.fleet.draining.items()}
            drains = DrainMonitor(known, lambda: loop.state.fleet.nodes, emit, loop.clock.from_wall)
            self._capacity = CapacityMonitor(lambda: loop.state, emit, clock=loop.clock.now)
            senses = (loop.heartbeats, drains, self._capacity)
            watches = [asyncio.get_running_loop().create_task(sense.run()) for sense in senses]
            while not isinstance(loop.state.phase, Finished):
                if self._page is not None:
                    self._page.show(loop.state)
                events = await self._next_events()
                try:
                    await loop.turn(events)
                except Fenced:
                    raise
                except Exception as error:
                    await self._restart(error)
                    raise
            for watch in watches:
                watch.cancel()
            await self._finish()
        except Fenced as error:
            # A newer controller owns the run and its workers: leave everything as it is.
            logger.warning("this controller ends: %s", error)
            await end_fenced()
        except BaseException as error:
            logger.exception("the controller of run %s cannot continue", self._settings.run_id)
            self._result = self._result or {"status": "not-finished", "reason": f"the controller failed: {error!r}"}
            if not self._ready.is_set():
                self._failed = repr(error)
            self._ready.set()
            self._ended.set()
            await self._tell_step()
            await self._close()
            raise
        asyncio.get_running_loop().call_later(_LINGER_S, end_actor)

    async def _restart(self, error: Exception) -> None:
        """Returns only where the budget for such restarts is spent, or the fault cannot be written down."""
        record = self._loop.fault(error)
        if record is None:
            return
        logger.exception("%s", record["sentence"])
        await self._records.write([record], limit_s=self._settings.failures.storage_timeout_s)
        if not self._records.pending:
            restart_process()

    async def _start(self, reconstructed: bool) -> None:
        settings, here = self._settings, ray.get_runtime_context().current_actor
        limit_s = settings.failures.storage_timeout_s
        store = CheckpointStore(settings.checkpoint.url, settings.run_id, timeout_s=limit_s)
        secrets = secret_values(os.environ)
        journal = partial(JournalWriter, settings.storage_url, settings.run_id, timeout_s=limit_s, secrets=secrets,
                          read_point=reader(settings))  # fmt: skip
        self._journal = await self._from_storage(journal)
        self._sinks = Sinks(file_sinks(settings.sinks), secrets)
        self._records.open(self._journal, self._sinks)
        journal_of = self._journal
        old = (
            replay(journal_of.replayed, settings, journal_of.problems, journal_of.point)
            if reconstructed
            else Replayed.nothing(settings, journal_of)
        )
        info = RunInfo(settings.run_id, old.attempt, self._journal.incarnation)
        self._sinks.open(info)
        # Dropped: a run of a month has many.
        self._journal.replayed, self._journal.point = (), None
        emit = self._events.put_nowait
        loop = self._loop = ControlLoop(settings, old, self._records, emit, self._step_done)
        self._links = AgentLinks(self._token, lambda: loop.state.fleet.slots, emit)
        self._executor = Executor(
            settings,
            old.attempt,
            self._journal.incarnation,
            self._entry,
            here,
            self._token,
            emit,
            loop.steps_recovered,
            self._links.watch,
            lambda step: loop.telemetry.contents.after(step),
            lambda node: self._relays.over(node, loop.state.fleet, loop.clock.now()),
            ray.get_runtime_context().get_node_id(),
        )
        self._given_back.clear()
        if self._on_train_page:
            self._page = TrainPage(settings, self._entry.config, info, secrets, self._executor.actor_id)
        self._committer = Committer(settings, store, versions(), emit, loop.note_checkpoint, loop.note_left_out)
        loop.connect(self._executor, self._committer)
        if isinstance(old.state.phase, Finished):
            # The controller was killed after the end of the run: it reports the end again and repeats nothing.
            self._ready.set()
            return
        if old.begun:
            first: ev.Event = await self._reattach(old, store)
            for worker in old.state.fleet.workers.values():
                node = old.state.fleet.node_of(worker.id)
                if node is not None and worker.phase is not WorkerPhase.STARTING:
                    loop.heartbeats.expect(worker.id, node, loop.clock.now())
        else:
            await self._executor.remove_orphans()
            self._records.note(run_began(settings.run_id, old.attempt))
            found = await self._from_storage(store.list)
            # What an earlier attempt went back from is in storage still.
            known = tuple((ref.id, ref.step) for ref in found if old.counts(ref.generation, ref.step))
            newest = max([old.generation, *(ref.generation for ref in found)])
            first = ev.RunStarted(known, newest, old.skips, old.measured, old.undone)
        await loop.turn([first])
        self._ready.set()

    async def _reattach(self, old: Replayed, store: CheckpointStore) -> ev.ControllerRestarted:
        state = old.state
        found = await self._executor.reattach(state, self._journal.incarnation)
        # The journal may lack events: checkpoints may have been committed meanwhile, even by a generation that no
        # worker which answers knows of.
        known = {checkpoint.id for checkpoint in state.saved.checkpoints}
        for ref in reversed(await self._from_storage(store.list)):
            if ref.id not in known and ref.generation >= state.generation:
                self._events.put_nowait(ev.CheckpointCommitted(ref.id, ref.step, ref.generation))
        return found

    async def _from_storage(self, ask: Callable[[], _T]) -> _T:
        """Retries: an outage of storage must not end a run, since its workers keep training."""
        failures = self._settings.failures
        return await asyncio.to_thread(retried, ask, failures.storage_backoff_s, failures.controller_lease_s)

    async def _next_events(self) -> list[ev.Event]:
        """All queued events; or a Tick when a deadline passes first; or nothing, when records may have to be
        written."""
        events: list[ev.Event] = []
        # Queued events come before a deadline: a wait of 0 s would not look at the queue.
        if self._events.empty():
            deadline = machine.next_deadline(self._loop.state)
            left_s = math.inf if deadline is None else max(0.0, deadline - self._loop.clock.now())
            try:
                linger_s = _QUIET_S if self._records.pending else _WRITE_S
                events.append(await asyncio.wait_for(self._events.get(), min(left_s, linger_s)))
            except asyncio.TimeoutError:
                return [ev.Tick()] if left_s <= linger_s else []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def _finish(self) -> None:
        loop, limit_s = self._loop, self._settings.failures.storage_timeout_s
        await self._committer.close(limit_s)
        loop.telemetry.flush(loop.clock.now(), force=True)
        for record in loop.telemetry.summary_records(loop.clock.now()):
            self._records.note(record)
        self._result = loop.result()
        self._records.note(run_ended(self._settings.run_id, self._result))
        await self._records.write(limit_s=limit_s)
        if self._records.failing:
            logger.error("the end of run %s could not be written down", self._settings.run_id)
        await asyncio.to_thread(self._sinks.close, _SINKS_LIMIT_S)
        if self._page is not None:
            self._page.show(loop.state, self._result["error"])
            await asyncio.to_thread(self._page.close, _SINKS_LIMIT_S)
        await self._close()
        self._ended.set()
        await self._tell_step()

    async def _close(self) -> None:
        """Release all resources; what Ray does not accept in time is released later, before this actor ends."""
        if self._given_back.is_set():
            return
        self._links.close()
        closing = asyncio.ensure_future(self._executor.close())
        closing.add_done_callback(lambda _: self._given_back.set())
        if (await asyncio.wait((closing,), timeout=_CLOSE_LIMIT_S))[0]:
            closing.result()
        else:
            logger.warning("Ray has not taken back the slots of run %s yet", self._settings.run_id)

    async def _leave(self) -> None:
        await self._given_back.wait()
        asyncio.get_running_loop().call_later(0.1, end_actor)


def _was_restarted() -> bool:
    with warnings.catch_warnings():
        # Ray's own property uses another of Ray's properties that it has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
