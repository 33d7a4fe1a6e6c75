"""The controller actor: feeds events to the state machine, one at a time, and has its actions carried out.

It decides nothing itself and holds no tensor. Every event is in the journal before it is acted on; a restarted
controller replays the journal and goes on, while the workers keep training.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import ray

from elastic.checkpoint.storage import CheckpointStore
from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core import machine
from elastic.core.detector import LastSeen
from elastic.core.errors import Fenced
from elastic.core.secrets import secret_values
from elastic.core.settings import RunSettings
from elastic.core.sharing import Claim
from elastic.core.state import USER_CODE_FAILED, Ending, Finished, RunState, Slot, Training, WorkerPhase
from elastic.core.steps import CompletedStep
from elastic.core.stragglers import StragglerWatch
from elastic.observe.journal import JournalWriter
from elastic.runtime.agent import BEAT_LIMIT_S, Beat
from elastic.runtime.committer import Committer
from elastic.runtime.drains import DrainWatch
from elastic.runtime.entry import Entry
from elastic.runtime.executor import Executor
from elastic.runtime.holdings import Assembled
from elastic.runtime.incidents import IncidentBook
from elastic.runtime.outbox import Item, Reply
from elastic.runtime.outlook import OutlookWatch
from elastic.runtime.patience import patiently
from elastic.runtime.progress import News, cadence_record, figures
from elastic.runtime.records import Records
from elastic.runtime.replay import Replayed, replay
from elastic.runtime.versions import versions

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Giving back what the run has in the cluster takes a second; longer only where Ray's control store is away.
_CLOSE_LIMIT_S = 30.0
# The finished controller stays reachable for this long, so that watchers can fetch the result.
_LINGER_S = 600.0


class ControllerActor:
    """Asyncio actor; detached, named, restarted by Ray for as long as the run goes on.

    Clients call `progress`, `wait_step`, `wait_end`, `stop`, `leave`; agents call `beat`; workers call `deliver`;
    controllers of other runs call `claim`.
    """

    def __init__(self, settings: Mapping[str, Any], entry: Entry, token: bytes) -> None:
        self._settings = RunSettings.from_json(settings)
        self._entry = entry
        # What the parts of this run know each other by; an argument, so that a restarted controller has it again.
        self._token = token
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        # Whether this actor holds nothing in the cluster (any more).
        self._given_back = asyncio.Event()
        self._given_back.set()
        self._stepped = asyncio.Condition()
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._records = Records()
        self._incidents = IncidentBook(self._records.note, self._settings.run_id)
        self._user_traceback: str | None = None
        self._news = News()
        self._fenced = 0
        self._result: dict[str, Any] | None = None
        failures = self._settings.failures
        self._seen = LastSeen(failures.heartbeat_s, failures.controller_lease_s)
        self._stragglers = StragglerWatch(self._settings.stragglers)
        self._last_turn = 0.0
        self._slots_of_nodes: Mapping[int, Slot] | None = None
        self._nodes: frozenset[str] = frozenset()
        self._outlook: OutlookWatch | None = None
        self._main = asyncio.get_running_loop().create_task(self._run(_was_restarted()))

    # --- for clients ---

    async def progress(self) -> dict[str, Any]:
        """The live figures; see `jobs.handle.RunHandle.progress`."""
        await self._ready.wait()
        status = self._result["status"] if self._result else "running"
        shown = figures(self._state, self._telemetry, self._news, self._stragglers.known())
        return {**shown, "status": status, "controller_pid": os.getpid()}

    async def wait_step(self, step: int, timeout_s: float) -> bool:
        await self._ready.wait()
        try:
            async with self._stepped:
                await asyncio.wait_for(
                    self._stepped.wait_for(lambda: self._telemetry.step >= step or self._result is not None), timeout_s
                )
        except asyncio.TimeoutError:
            return False
        return self._telemetry.step >= step

    async def wait_end(self, timeout_s: float) -> dict[str, Any] | None:
        if self._ended.is_set():
            # A wait without time would not even look.
            return self._result
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            return None
        return self._result

    async def stop(self, reason: str) -> None:
        self._events.put_nowait(ev.StopRequested(reason))

    async def leave(self) -> None:
        """The result has been fetched: this actor may end."""
        if self._result is not None:
            asyncio.get_running_loop().create_task(self._leave())

    # --- for the controllers of other runs ---

    async def claim(self) -> Claim | None:
        """What this run has and needs; None of a run that is over, or has not looked yet."""
        return self._outlook.claim if self._outlook is not None and self._result is None else None

    # --- for agents and workers ---

    async def beat(self, beat: Beat) -> bool:
        """One node's heartbeat. False when the node is not part of the run: the agent then ends its workers."""
        await self._ready.wait()
        if isinstance(self._state.stage, Finished) or self._result is not None:
            return False
        now = time.time()
        if self._slots_of_nodes is not self._state.slots:
            # Not with every beat: of a thousand nodes five thousand come in a second.
            self._slots_of_nodes, self._nodes = self._state.slots, frozenset(self._state.nodes)
        if beat.node not in self._nodes:
            return False
        self._seen.heard_node(beat.node, now, beat.ages)
        for worker, evidence in beat.gone.items():
            self._events.put_nowait(ev.WorkerDied(worker, evidence))
        return True

    async def deliver(self, worker: int, items: Sequence[Item]) -> Reply:
        """A worker's messages, in order. A worker that was written off is told so, and nothing it says counts."""
        await self._ready.wait()
        known = self._state.workers.get(worker)
        if known is None:
            self._fenced += len(items)
            logger.warning("worker %d was written off and is told to end; %d messages refused", worker, len(items))
            return Reply(self._journal.incarnation, fenced=True)
        node = self._state.node_of(worker)
        if node is not None:
            self._seen.heard_worker(worker, node, time.time())
        for item in items:
            self._take(item)
        return Reply(self._journal.incarnation)

    async def snapshot(self, identifier: str) -> Assembled:
        """What a worker needs to restore a snapshot from memory. Raises IntegrityError or StorageError."""
        await self._ready.wait()
        return await self._executor.holdings.wait_for(identifier)

    def _take(self, item: Item) -> None:
        now = time.time()
        if item.kind == "event":
            self._events.put_nowait(ev.from_json(item.data))
        elif item.kind == "shard":
            self._take_shard(item.data)
        elif item.data["generation"] != self._state.generation:
            # Reports of what was rolled back, or is in the journal already.
            logger.debug("a %s report of generation %d came late", item.kind, item.data["generation"])
        elif item.kind == "step":
            done, first = self._telemetry.report(item.data, now)
            if first is not None:
                self._events.put_nowait(first)
            if done is not None:
                self._completed(done, now)
        elif item.kind == "cadence":
            self._records.note(cadence_record(item.data))
        elif item.kind == "restored":
            restore = self._telemetry.restored(item.data)
            if restore is not None:
                self._incidents.restored(restore)

    def _completed(self, done: CompletedStep, now: float) -> None:
        """Every rank has finished the step."""
        if done.anomaly:
            self._events.put_nowait(ev.StepSkipped(done.generation, done.step, done.anomaly, done.skipped))
        for found in () if done.first else self._stragglers.step(done.generation, done.own_s):
            self._events.put_nowait(found)
        self._incidents.step_done(done.step, now)
        asyncio.get_running_loop().create_task(self._tell_step())

    def _take_shard(self, shard: Any) -> None:
        """A shard counts only while its generation is the newest one: a late waker's never does."""
        if shard.generation != self._state.generation:
            self._fenced += 1
            logger.warning("a shard of generation %d is refused: %d runs", shard.generation, self._state.generation)
            return
        state = self._state
        newest = max((known.step for known in state.checkpoints if known.id not in state.rejected), default=-1)
        self._committer.add(shard, state.base.id if state.base else None, newest)

    async def _tell_step(self) -> None:
        async with self._stepped:
            self._stepped.notify_all()

    # --- the loop ---

    async def _run(self, reconstructed: bool) -> None:
        try:
            await self._start(reconstructed)
            known = {node: notice.deadline for node, notice in self._state.draining.items()}
            drains = DrainWatch(known, lambda: self._state.nodes, self._events.put_nowait)
            self._outlook = OutlookWatch(lambda: self._state, self._events.put_nowait)
            loops = (self._watch(), drains.run(), self._outlook.run())
            watches = [asyncio.get_running_loop().create_task(watch) for watch in loops]
            while not isinstance(self._state.stage, Finished):
                await self._turn(await self._next_events())
            for watch in watches:
                watch.cancel()
            await self._finish()
        except Fenced as error:
            # A newer controller owns the run and its workers: leave everything as it is.
            logger.warning("this controller ends: %s", error)
            _exit()
        except BaseException as error:
            logger.exception("the controller of run %s cannot go on", self._settings.run_id)
            self._result = self._result or {"status": "not-finished", "reason": f"the controller failed: {error!r}"}
            self._ready.set()
            self._ended.set()
            await self._tell_step()
            await self._close()
            raise
        asyncio.get_running_loop().call_later(_LINGER_S, _exit)

    async def _start(self, reconstructed: bool) -> None:
        settings, here = self._settings, ray.get_runtime_context().current_actor
        limit_s = settings.failures.storage_timeout_s
        store = CheckpointStore(settings.checkpoint.url, settings.run_id, timeout_s=limit_s)
        secrets = secret_values(os.environ)
        journal = partial(JournalWriter, settings.storage_url, settings.run_id, timeout_s=limit_s, secrets=secrets)
        self._journal = await self._from_storage(journal)
        self._records.open(self._journal)
        old = replay(self._journal.replayed, settings) if reconstructed else Replayed.nothing(settings, self._journal)
        # Not kept: of a month they are many.
        self._journal.replayed = ()
        self._telemetry = old.telemetry(settings, time.time(), self._records.note)
        self._state: RunState = old.state
        self._stragglers.begin(old.state.generation, old.state.members)
        self._executor = Executor(
            settings, old.attempt, self._entry, here, self._token, self._events.put_nowait, self._steps_recovered
        )
        self._given_back.clear()
        self._committer = Committer(settings, store, versions(), self._events.put_nowait, self._note_checkpoint)
        if isinstance(old.state.stage, Finished):
            # Killed after the end, while it could still be asked: the end is told again, nothing is done again.
            self._ready.set()
            return
        if reconstructed and old.records:
            await self._executor.reattach(old.state)
            for worker in old.state.workers.values():
                node = old.state.node_of(worker.id)
                if node is not None and worker.phase is not WorkerPhase.STARTING:
                    # An agent may be waiting for the answer of the controller before.
                    self._seen.expect(worker.id, node, time.time() + BEAT_LIMIT_S)
            first: ev.Event = ev.ControllerRestarted(self._journal.incarnation)
        else:
            await self._executor.sweep()
            self._records.note({"type": "run", "status": "running", "run_id": settings.run_id, "attempt": old.attempt})
            found = await self._from_storage(store.list)
            known = tuple((ref.id, ref.step) for ref in found)
            first = ev.RunStarted(known, max([old.generation, *(ref.generation for ref in found)]), old.skips)
        await self._turn([first])
        self._ready.set()

    async def _from_storage(self, ask: Callable[[], _T]) -> _T:
        """Storage that is away just now must not end a run: its workers train on for as long as this asks."""
        failures = self._settings.failures
        return await asyncio.to_thread(patiently, ask, failures.storage_backoff_s, failures.controller_lease_s)

    async def _next_events(self) -> list[ev.Event]:
        """Whatever waits; or a Tick when a deadline passes first."""
        events: list[ev.Event] = []
        # What waits is heard before a deadline passes: a wait without time would not even look at the queue.
        if self._events.empty():
            deadline = machine.next_deadline(self._state, machine.DEFAULT_POLICY)
            timeout = None if deadline is None else max(0.0, deadline - time.time())
            try:
                events.append(await asyncio.wait_for(self._events.get(), timeout))
            except asyncio.TimeoutError:
                return [ev.Tick()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def _turn(self, events: Sequence[ev.Event]) -> None:
        """Journal first, then decide, then act."""
        now = self._last_turn = max(time.time(), self._last_turn)
        fresh = [event for event in events if not machine.is_fenced(self._state, event)]
        self._fenced += len(events) - len(fresh)
        if any(isinstance(event, ev.CheckpointCommitted) for event in fresh):
            # A step that a checkpoint covers is never done again, so what is known of it must not be lost either.
            self._telemetry.flush(now, force=True)
        await self._records.write([{"type": "event", "now": now, **ev.to_json(event)} for event in fresh])
        for event in fresh:
            before = self._state
            self._state, actions = machine.step(before, event, now)
            self._follow(before, event, now)
            for action in actions:
                self._act(action, now)
        await self._records.write()

    def _act(self, action: act.Action, now: float) -> None:
        if isinstance(action, act.Note):
            self._user_traceback = action.data.get("traceback") or self._user_traceback
            self._news.hear(action)
            logger.info("%s", action.sentence)
            place = {"generation": self._state.generation, "world_size": self._state.world_size}
            self._records.note(
                {"type": "decision", "kind": action.kind, "sentence": action.sentence, "step": self._telemetry.step}
                | place | {"data": dict(action.data)}
            )  # fmt: skip
        elif isinstance(action, act.CloseIncident):
            self._incidents.close(action.incident)
        elif isinstance(action, act.BeginGeneration) and not self._is_reissue(action):
            self._telemetry.generation_begins(action.generation, len(action.members), action.step, now, action.skips)
            self._stragglers.begin(action.generation, action.members)
        self._executor.perform(action)

    def _is_reissue(self, action: act.BeginGeneration) -> bool:
        return action.generation == self._telemetry.generation

    def _follow(self, before: RunState, event: ev.Event, now: float) -> None:
        """Keep the tables beside the state in step with it."""
        state = self._state
        self._telemetry.owner(state, now)
        if isinstance(event, ev.SlotPlaced) and event.slot in state.slots:
            self._executor.placed(event.slot, event.node)
        if isinstance(event, ev.CheckpointCommitted):
            self._telemetry.time.commit(event.step)
        if before.workers.keys() != state.workers.keys():
            self._seen.retain(state.workers.keys())
        # The same members may begin the next generation in the very turn in which this one ended.
        if before.members and (before.members, before.generation) != (state.members, state.generation):
            self._telemetry.generation_ended(before.generation)

    def _steps_recovered(self, generation: int, world_size: int, steps: Mapping[int, Any]) -> None:
        self._telemetry.recovered(generation, world_size, steps, time.time())

    def _note_checkpoint(self, record: dict[str, Any]) -> None:
        self._records.note({**record, "stall_s": self._telemetry.stall_of(record["step"])})

    async def _watch(self) -> None:
        """Look for silence and standstill; what is found is an event like any other."""
        while True:
            await asyncio.sleep(self._settings.failures.heartbeat_s / 2)
            try:
                self._look(time.time())
            except Exception:
                # A run that nobody watches any more would be worse than a look that was missed.
                logger.exception("looking for silence and standstill failed")

    def _look(self, now: float) -> None:
        failures, state = self._settings.failures, self._state
        ending = isinstance(state.stage, Ending)
        limit_s = failures.probe_timeout_s + failures.heartbeat_s if ending else failures.suspect_after_s
        silence = self._seen.silent(now, limit_s)
        if silence is not None:
            self._events.put_nowait(silence)
        # Who hears nobody does not know whether steps end.
        training = isinstance(state.stage, Training) and not self._seen.alone(now, failures.suspect_after_s)
        stalled = self._telemetry.watch.check(state.generation, self._telemetry.step, now, training)
        if stalled is not None:
            self._events.put_nowait(stalled)
        self._telemetry.flush(now)

    async def _finish(self) -> None:
        stage = self._state.stage
        assert isinstance(stage, Finished)
        limit_s = self._settings.failures.storage_timeout_s
        await self._committer.close(limit_s)
        self._telemetry.flush(time.time(), force=True)
        for record in self._telemetry.summary_records(time.time()):
            self._records.note(record)
        self._result = {
            "status": stage.status,
            "reason": stage.reason,
            "step": self._telemetry.step,
            "loss": self._telemetry.loss,
            "fenced_messages": self._fenced,
            "false_alarms": self._state.false_alarms,
            "error": self._user_traceback if stage.status == USER_CODE_FAILED else None,
        }
        self._records.note({"type": "run", "run_id": self._settings.run_id, **self._result})
        await self._records.write(limit_s=limit_s)
        if self._records.failing:
            logger.error("the end of run %s could not be written down", self._settings.run_id)
        await self._close()
        self._ended.set()
        await self._tell_step()

    async def _close(self) -> None:
        """Give everything back; what Ray does not take in time is given back when it does, before this actor ends."""
        if self._given_back.is_set():
            return
        closing = asyncio.ensure_future(self._executor.close())
        closing.add_done_callback(lambda _: self._given_back.set())
        if (await asyncio.wait((closing,), timeout=_CLOSE_LIMIT_S))[0]:
            closing.result()
        else:
            logger.warning("Ray has not taken back the slots of run %s yet", self._settings.run_id)

    async def _leave(self) -> None:
        await self._given_back.wait()
        asyncio.get_running_loop().call_later(0.1, _exit)


def _exit() -> None:
    """End this actor for good, from wherever it is called."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _was_restarted() -> bool:
    with warnings.catch_warnings():
        # Ray's own property uses another of Ray's properties that it has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
