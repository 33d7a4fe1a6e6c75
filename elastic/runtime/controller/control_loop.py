"""The control loop: each event is journaled, then decided on, then acted on; and the tables next to the run's state.

This module holds the controller's knowledge of its run. Calls of other actors, clocks and deadlines are handled in
`actor.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.data.steps import CompletedStep, StepReport
from elastic.core.event_groups import together
from elastic.core.fleet import Workers
from elastic.core.policy.measured import StepTimes
from elastic.core.policy.stragglers import CollectiveWatch, StragglerWatch
from elastic.core.run import machine
from elastic.core.run.phase import USER_CODE_FAILED, Finished, Joining
from elastic.core.run.state import RunState
from elastic.core.settings import RunSettings
from elastic.core.sharding.mesh_memory import MemoryReports
from elastic.core.typed_json import encode
from elastic.observe import records
from elastic.runtime.controller.acks import Acks
from elastic.runtime.controller.clock import RunClock
from elastic.runtime.controller.committer import Committer
from elastic.runtime.controller.faults import fault_record, unable, unreadable_record
from elastic.runtime.controller.hands.executor import Executor
from elastic.runtime.controller.incidents import IncidentBook
from elastic.runtime.controller.progress import (
    News,
    cadence_record,
    figures,
    function_left_record,
    left_out_record,
    rehearsed_record,
    replica_moved_record,
    unfinished_step_record,
)
from elastic.runtime.controller.records import Records
from elastic.runtime.controller.replay import Replayed
from elastic.runtime.controller.replay_state import ReplayState
from elastic.runtime.controller.senses.heartbeat_table import HeartbeatTable
from elastic.runtime.messages import Item, NodeReports, Post, Reply

logger = logging.getLogger(__name__)


class ControlLoop:
    """One per controller. All methods run in the controller's event loop; only `turn` waits.

    `emit` puts an event into the controller's queue; `stepped` is called after each completed step. `fenced` counts
    refused messages.
    """

    def __init__(
        self,
        settings: RunSettings,
        old: Replayed,
        journal: Records,
        emit: Callable[[ev.Event], None],
        stepped: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._records = journal
        self._emit = emit
        self._stepped = stepped
        self.state: RunState = old.state
        self.clock = RunClock(old.last_time)
        self.telemetry = old.telemetry(settings, self.clock.now(), journal.note)
        self.heartbeats = HeartbeatTable(settings.failures, lambda: self.state, self.telemetry, emit, self.clock.now)
        self.fenced = 0
        # What workers that join may rehearse, and what collectives of their set-up gave, as the newest rank 0 has told.
        self.passes: Sequence[Any] = ()
        self.recording: bytes | None = None
        self._incidents = IncidentBook(journal.note, settings.run_id)
        self._stragglers = StragglerWatch(settings.stragglers)
        self._stragglers.begin(old.state.generation, old.state.members)
        self._collectives = CollectiveWatch(settings.stragglers)
        self._collectives.begin(old.state.generation)
        self._step_times = StepTimes()
        self._memory = MemoryReports()
        self._news = News()
        self._acks = Acks()
        # The number of the last message of each worker that this controller has been sent.
        self._newest: dict[int, int] = {}
        # Of this table, groups of workers that are all in it.
        self._checked: tuple[Workers, set[tuple[int, ...]]] = self.state.fleet.workers, set()
        self._user_traceback: str | None = None
        self._attempt = old.attempt
        self._faults = old.faults
        # The number of the last event of this attempt; and of the event that is being handled the number, and what
        # tells which of those that it stands for are left out if this fails.
        self._number = old.events
        self._handling: tuple[int, Callable[[], Sequence[ev.Event]]] | None = None
        self._executor: Executor
        self._committer: Committer

    def connect(self, executor: Executor, committer: Committer) -> None:
        """Set the objects that carry out actions; they report back to this object."""
        self._executor, self._committer = executor, committer

    def progress(self) -> dict[str, Any]:
        """The live figures but for the status; see `progress.figures`."""
        return figures(self.state, self.telemetry, self._news, self._stragglers.known())

    def result(self) -> dict[str, Any]:
        """The run's outcome; only after its end."""
        phase = self.state.phase
        assert isinstance(phase, Finished)
        newest = self.state.saved.newest_checkpoint
        return {
            "status": phase.status,
            "reason": phase.reason,
            "step": self.telemetry.step,
            "loss": self.telemetry.loss,
            "metrics": dict(self.telemetry.metrics),
            "checkpoint_step": newest.step if newest is not None else None,
            "fenced_messages": self.fenced,
            "false_alarms": self.state.trouble.false_alarms,
            "error": self._user_traceback if phase.status == USER_CODE_FAILED else None,
        }

    # --- messages of workers ---

    def answer(self, worker: int, items: Sequence[Item], heard: int | None, incarnation: int) -> Reply:
        """See `ControllerActor.deliver`; `incarnation` is this controller's."""
        if heard not in (None, incarnation) and worker in self.state.fleet.workers:
            return Reply(incarnation, taken=False)
        taken = self.deliver(worker, items, self.clock.now())
        return Reply(incarnation, fenced=not taken, durable=self.durable(worker))

    def answer_all(self, posts: Mapping[int, Post], incarnation: int) -> dict[int, Reply]:
        """A worker's messages come in their order, but for those that its agent still had when the worker sent them
        itself: these are not taken again, after newer ones."""
        return {
            worker: Reply(incarnation, durable=self.durable(worker))
            if items and items[-1].number <= self._newest.get(worker, 0)
            else self.answer(worker, items, heard, incarnation)
            for worker, (heard, items, _) in posts.items()
        }

    def deliver(self, worker: int, items: Sequence[Item], now: float) -> bool:
        """A worker's messages, in order. False, and all are ignored, when the worker was removed from the run."""
        if worker not in self.state.fleet.workers:
            self.fenced += len(items)
            logger.warning(
                "worker %d is not part of the run; %d of its messages refused, and it ends", worker, len(items)
            )
            return False
        self.heartbeats.worker_spoke(worker, now)
        if items:
            self._newest[worker] = items[-1].number
        for item in items:
            try:
                self._take(worker, item, now)
            except Exception as error:
                # The worker would send it again for ever, and everything behind it would wait.
                logger.exception("a message of worker %d could not be taken", worker)
                self._records.note(unreadable_record(error, worker, item.kind, self.telemetry.step, self._place()))
        return True

    def node_reports(self, reports: NodeReports, now: float) -> bool:
        """Step reports of some nodes' workers. False, and nothing is taken, where a worker is not part of the run, or
        has sent some of them itself."""
        if not self._are_part(reports.workers) or not all(map(self.telemetry.table.takes, reports.steps)):
            return False
        self.heartbeats.agents_spoke(reports.nodes, now)
        for joined in reports.steps:
            try:
                if joined.generation == self.state.generation:
                    self._reported(self.telemetry.joined_reports(joined, now), now)
            except Exception as error:
                logger.exception("step reports of node %s could not be taken", reports.nodes[0][:8])
                worker, step = reports.workers[0], self.telemetry.step
                self._records.note(unreadable_record(error, worker, "step", step, self._place()))
        return True

    def _are_part(self, workers: tuple[int, ...]) -> bool:
        """The same workers report every step: they are looked up again when the fleet has changed."""
        known = self.state.fleet.workers
        if known is not self._checked[0]:
            self._checked = known, set()
        if workers in self._checked[1]:
            return True
        if not all(worker in known for worker in workers):
            return False
        self._checked[1].add(workers)
        return True

    def all_durable(self, workers: Sequence[int]) -> tuple[int, ...]:
        """`durable` of each."""
        self._acks.written(self._records.durable)
        return tuple([self._acks.durable(worker) for worker in workers])

    def durable(self, worker: int) -> int:
        """Up to which number this worker's events are in the journal."""
        self._acks.written(self._records.durable)
        return self._acks.durable(worker)

    def _take(self, worker: int, item: Item, now: float) -> None:
        if item.kind == "event":
            event = ev.from_json(item.data)
            self._acks.heard(event, worker, item.number)
            self._emit(event)
        elif item.kind == "shard":
            self._take_shard(item.data)
        elif item.kind == "function_left":
            self._records.note(function_left_record({**item.data, **self._place(), "step": self.telemetry.step}))
        elif item.kind == "rehearsed":
            self._records.note(rehearsed_record({**item.data, **self._place(), "step": self.telemetry.step}))
        elif _generation_of(item) != self.state.generation:
            # Reports of steps that were rolled back, or are in the journal already.
            logger.debug("a %s report of generation %d came late", item.kind, _generation_of(item))
        elif item.kind == "step":
            self._reported(self.telemetry.report(item.data, now), now)
        elif item.kind == "memory":
            self._memory_used(item.data)
        elif item.kind == "passes":
            self.passes = item.data["passes"]
        elif item.kind == "recorded":
            self.recording = item.data["recording"]
        elif item.kind == "moved":
            self.telemetry.watch.moved(item.data["generation"], now, over=bool(item.data["over"]))
            self._set_up_moved(worker, now)
        elif item.kind == "cadence":
            self._records.note(cadence_record(item.data))
        elif item.kind == "replica_moved":
            self._records.note(replica_moved_record(item.data))
        elif item.kind == "save_left_out":
            self.note_left_out(item.data)
        elif item.kind == "restored":
            restore = self.telemetry.restored(item.data)
            if restore is not None:
                self._incidents.restored(restore)
                unfinished = unfinished_step_record(restore, item.data["world_size"])
                if unfinished is not None:
                    self._records.note(unfinished)

    def _set_up_moved(self, worker: int, now: float) -> None:
        """Reported every second and by everybody; the rules need it a few times per limit, and the journal no more."""
        phase, limit_s = self.state.phase, self.state.settings.failures.join_timeout_s
        if isinstance(phase, Joining) and worker not in phase.training and now - phase.progress_at > limit_s / 8:
            self._emit(ev.SetUpProgressed(self.state.generation, worker))

    def _reported(self, found: tuple[CompletedStep | None, ev.FirstStepDone | None], now: float) -> None:
        done, first = found
        if first is not None:
            self._emit(first)
        if done is not None:
            self._completed(done, now)

    def _completed(self, done: CompletedStep, now: float) -> None:
        """Every rank has finished the step."""
        if done.anomaly:
            self._emit(ev.StepSkipped(done.generation, done.step, done.anomaly, done.skipped))
        if not done.first:
            self._measured(done)
        self._incidents.step_done(done.step, now)
        self._stepped()

    def _measured(self, done: CompletedStep) -> None:
        for found in self._stragglers.step(done.generation, done.noncollective_s, done.slowed):
            self._emit(found)
        slowed = self._collectives.step(done.generation, done.collectives, done.noncollective_s)
        if slowed is not None:
            self._emit(slowed)
        known_s = self.state.meter.measured.step_s.get(self.state.world_size)
        step_s = self._step_times.add(done.generation, done.duration_s, known_s)
        if step_s is not None:
            self._emit(ev.StepTimeMeasured(done.generation, round(step_s, 6)))

    def _memory_used(self, told: Mapping[str, Any]) -> None:
        found = self._memory.add(told)
        if found is not None:
            limit, rest, held = found
            self._emit(ev.MemoryMeasured(told["generation"], limit, rest, encode(held)))

    def _take_shard(self, shard: Any) -> None:
        """A shard counts only while its generation is the newest: shards of a frozen worker that wakes up late do
        not."""
        if shard.generation != self.state.generation:
            self.fenced += 1
            logger.warning("a shard of generation %d is refused: %d runs", shard.generation, self.state.generation)
            return
        state = self.state
        if not state.trouble.counts(shard.generation, shard.step):
            # Its checkpoint would take the place of an older one, which is good.
            logger.warning("a shard of step %d is refused: the run goes back to before it", shard.step)
            return
        newest = max(
            (known.step for known in state.saved.checkpoints if known.id not in state.saved.rejected), default=-1
        )
        self._committer.add(shard, state.base.id if state.base else None, newest)

    def steps_recovered(self, generation: int, world_size: int, steps: Mapping[int, Any]) -> None:
        """Step reports that were stored with an in-memory snapshot: their workers may be gone."""
        self.telemetry.recovered(generation, world_size, steps, self.clock.now())

    def note_checkpoint(self, identifier: str, step: int, size: int, seconds: float) -> None:
        stall_s = self.telemetry.stall_of(step)
        self._records.note(records.checkpoint(identifier, step, size, seconds, stall_s))

    def note_left_out(self, told: Mapping[str, Any]) -> None:
        self._records.note(left_out_record(told))

    # --- turns ---

    async def turn(self, events: Sequence[ev.Event]) -> None:
        """Journal first, then decide, then act."""
        now = self.clock.now()
        self._handling = None
        # Taken together first: one look at the generation for all members that report.
        taken = together(e for e in events if not self._faults.refuses(e))
        fresh = [(event, parts) for event, parts in taken if not machine.is_fenced(self.state, event)]
        self.fenced += len(events) - sum(len(parts) for _, parts in fresh)
        if fresh:
            # Steps first: a replay follows the journal's order. And a step that a checkpoint covers is never repeated,
            # so its record must not be lost.
            self.telemetry.flush(now, force=True)
        numbered = list(enumerate(fresh, self._number + 1))
        self._number += len(numbered)
        for number, (event, _) in numbered:
            self._records.note(records.event(event, now, number))
        self._acks.taken(events, self._records.noted)
        # The only wait for storage before a decision: records noted below are written with the next events, or after a
        # quiet moment.
        await (self._records.write() if fresh else self._records.start())
        first = self.state
        for number, (event, parts) in numbered:
            before = self.state
            self._handling = number, partial(unable, before, event, parts, now)
            self.state, actions = machine.step(before, event, now)
            self._follow(before, event, now)
            for action in actions:
                self._act(action, now)
        self._handling = None
        if self.state.meter.measured != first.meter.measured:
            self._records.note(records.facts(self.state.meter.measured))
        self._forget_lost(first)
        if self._records.point_is_due:
            self._keep_point(now)

    def _keep_point(self, now: float) -> None:
        """What a replay of all records so far would give becomes a replay point."""
        self.telemetry.flush(now, force=True)
        books, state = self.telemetry.books(), self.state
        kept = ReplayState(self._attempt, state.generation, self._number, now, self._faults, state, books)
        self._records.keep_point(kept.writer())

    def fault(self, error: Exception) -> records.Record | None:
        """The record of what `turn` has raised; None where the budget for such faults is spent."""
        step = self.telemetry.step
        if self._faults.budget_spent(step):
            return None
        number, left_out = self._handling or (None, tuple)
        return fault_record(error, left_out(), number, step, self._place())

    def _place(self) -> dict[str, int]:
        return {"generation": self.state.generation, "world_size": self.state.world_size}

    def _act(self, action: act.Action, now: float) -> None:
        if isinstance(action, act.Note):
            self._user_traceback = action.data.get("traceback") or self._user_traceback
            self._news.hear(action)
            logger.info("%s", action.sentence)
            self._records.note(records.decision(
                action.kind, action.sentence, step=self.telemetry.step, data=action.data, **self._place(),
            ))  # fmt: skip
        elif isinstance(action, act.CloseIncident):
            self._incidents.close(action.incident)
        elif isinstance(action, act.BeginGeneration) and not self._is_reissue(action):
            mesh = self._settings.mesh.shared(action.axes, len(action.members))
            self.telemetry.generation_begins(
                action.generation, len(action.members), action.step, now, action.skips, mesh
            )
            self._stragglers.begin(action.generation, action.members)
            self._collectives.begin(action.generation)
        self._executor.perform(action)

    def _is_reissue(self, action: act.BeginGeneration) -> bool:
        return action.generation == self.telemetry.generation

    def _follow(self, before: RunState, event: ev.Event, now: float) -> None:
        """Update the tables next to the state after a transition."""
        state = self.state
        self.telemetry.owner(state, now)
        if isinstance(event, ev.SlotPlaced) and event.slot in state.fleet.slots:
            self._executor.placed(event.slot, event.node)
        if isinstance(event, ev.CheckpointCommitted):
            self.telemetry.committed(event.step)
        elif isinstance(event, ev.FirstStepDone):
            self.telemetry.table.first_known(event.generation)
        # The same members may begin the next generation in the turn that ended this one.
        if before.members and (before.members, before.generation) != (state.members, state.generation):
            self.telemetry.generation_ended(before.generation, now)

    def _forget_lost(self, before: RunState) -> None:
        """What is known, outside of the state, about workers and nodes that have left the run since `before`."""
        old, new = before.fleet, self.state.fleet
        # A number stands for one slot or worker only: fewer than came means that some have left.
        slots_left = len(old.slots) + new.next_slot - old.next_slot > len(new.slots)
        workers_left = len(old.workers) + new.next_worker - old.next_worker > len(new.workers)
        if slots_left or workers_left:
            known = set(new.workers)
            self.heartbeats.retain(known, new.nodes)
            self._acks.retain(known)
            self._newest = {worker: number for worker, number in self._newest.items() if worker in known}


def _generation_of(item: Item) -> int:
    data = item.data
    return data.generation if isinstance(data, StepReport) else int(data["generation"])
