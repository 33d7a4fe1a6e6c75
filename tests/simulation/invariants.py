"""Invariants that must hold after every event. Each rule states what it protects."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import is_snapshot, parse_snapshot_id
from elastic.core.mesh import whole_cells
from elastic.core.run import machine
from elastic.core.run.phase import (
    FINISHED,
    NO_CAPACITY,
    STOPPED,
    Closing,
    Ending,
    Finished,
    Joining,
    Pausing,
    Training,
    Waiting,
)
from elastic.core.run.state import RunState, SlotPhase
from elastic.core.sharding.mesh_memory import predict

if TYPE_CHECKING:
    from simulation.controller import Controller
    from simulation.world import World


class Invariants:
    def __init__(self, world: World) -> None:
        self.world = world
        self.requested: set[int] = set()
        self.released: set[int] = set()
        self.started: set[int] = set()
        self.begun: set[int] = set()
        self.closed: set[int] = set()
        self.finishes = 0
        # The numbers of requested and released slots at the last check.
        self.books = (-1, -1)
        # A drain was cancelled: there may be one slot too many for a while.
        self.stayed = False

    def forget(self, state: RunState, newest: int) -> None:
        """A controller was restarted whose journal ends with `state`. Of what the previous one did after that, only the
        number of the `newest` generation is known."""
        self.requested = {slot for slot in self.requested if slot < state.fleet.next_slot}
        self.released = self.requested - state.fleet.slots.keys()
        self.started = {worker for worker in self.started if worker < state.fleet.next_worker}
        self.begun = {number for number in self.begun if number <= newest}
        self.closed = set(range(1, state.trouble.incidents + 1)) - (
            {state.trouble.incident.id} if state.trouble.incident else set()
        )
        self.finishes = 0

    def check(
        self, before: RunState, event: ev.Event, now: float, after: RunState, actions: tuple[act.Action, ...]
    ) -> None:
        """Raises AssertionError naming the broken rule."""
        self._fencing(before, event, after, actions)
        self.stayed |= any(isinstance(a, act.Note) and "no longer draining" in a.sentence for a in actions)
        self._monotone(before, event, after)
        self._control_store(before, event, after)
        again = isinstance(event, ev.ControllerRestarted)
        for action in actions:
            self._action(before, after, action, again, event)
        if isinstance(after.phase, Ending) and not isinstance(before.phase, Ending):
            told = {w for action in actions if isinstance(action, act.EndGeneration) for w in action.workers}
            assert told >= set(after.members_inside), "a member was not told that its generation ends"
        if after is not before:
            self._members(after)
            self._slots(before, after)
            self._budgets(after)
            self._anomalies(before, after)
            self._incidents(before, after)
        self._waits_for_something(after)
        if isinstance(event, ev.Tick):
            deadline = machine.next_deadline(after)
            assert deadline is None or deadline > now, f"the clock would spin: next tick {deadline}, now {now}"
        self._remember(before, after, event, actions)

    # --- the rules ---

    def _fencing(self, before: RunState, event: ev.Event, after: RunState, actions: tuple[act.Action, ...]) -> None:
        """A message of another or an ended generation, or of a worker that is not a member, changes nothing."""
        generation, worker = getattr(event, "generation", None), getattr(event, "worker", None)
        if generation is None:
            return
        over = not isinstance(before.phase, Joining | Training | Pausing | Ending)
        stranger = worker is not None and worker not in before.members
        if generation != before.generation or over:
            assert after is before, "a fenced message changed the state"
            assert not actions, "a fenced message caused actions"
        elif stranger:
            assert after == before, "a stranger's message changed the state"
            assert not actions, "a stranger's message caused actions"

    def _monotone(self, before: RunState, event: ev.Event, after: RunState) -> None:
        """Numbers of generations, slots and workers are used once; progress is never taken back."""
        if before.fleet.next_slot:
            last = before.generation
            if isinstance(event, ev.ControllerRestarted):
                last = max(last, event.newest_generation)
            elif isinstance(event, ev.SnapshotsReported):
                last = max([last, *(parse_snapshot_id(name)[1] for name, _ in event.snapshots)])
            elif isinstance(event, ev.CheckpointCommitted):
                last = max(last, event.by_generation)
            assert before.generation <= after.generation <= last + 1
        assert after.furthest_step >= before.furthest_step, "the furthest step went back"
        assert after.fleet.next_slot >= before.fleet.next_slot
        assert after.fleet.next_worker >= before.fleet.next_worker
        assert after.trouble.incidents - before.trouble.incidents in (0, 1, 2)
        assert set(before.saved.rejected) <= set(after.saved.rejected)

    def _control_store(self, before: RunState, event: ev.Event, after: RunState) -> None:
        """While Ray's control store is away no node or worker can start, so none is late."""
        if before.fleet.control_store_away and isinstance(event, ev.Tick):
            assert after.trouble.streaks.start_failures <= before.trouble.streaks.start_failures, "a start was late"
            refused = isinstance(after.phase, Finished) and after.phase.status == NO_CAPACITY
            assert not refused, "the run was ended for want of nodes that could not come"

    def _action(self, before: RunState, after: RunState, action: act.Action, again: bool, event: ev.Event) -> None:
        if isinstance(action, act.RequestSlot):
            assert again or action.slot not in self.requested, "a slot was requested twice"
            self.requested.add(action.slot)
        elif isinstance(action, act.ReleaseSlot):
            assert action.slot in self.requested, "a slot was released that was never asked for"
            assert action.slot not in self.released, "a slot was released twice"
            self.released.add(action.slot)
        elif isinstance(action, act.StartWorker):
            assert again or action.worker not in self.started, "a worker was started twice"
            assert action.slot not in self.released, "a worker was started in a slot that is gone"
            self.started.add(action.worker)
        elif isinstance(action, act.BeginGeneration):
            self._begin(before, after, action, again, event)
        elif isinstance(action, act.CommitStop):
            promises = [self.world.cluster.processes[worker].promised or 0 for worker in action.workers]
            assert action.step >= max(promises, default=0), (
                "a member is asked to stop at a step that it may have passed"
            )
        elif isinstance(action, act.CloseIncident):
            assert action.incident.id not in self.closed, "an incident was closed twice"
            self.closed.add(action.incident.id)
            times = [action.incident.times[key] for key in ("detected", "decided", "first_step") if key in
                     action.incident.times]  # fmt: skip
            assert times == sorted(times), f"an incident's times are out of order: {action.incident.times}"
            self.world.seen(f"incident {action.incident.kind}")
        elif isinstance(action, act.FinishRun):
            assert again or not self.finishes, "the run finished twice"
            self.finishes += 1

    def _begin(
        self, before: RunState, after: RunState, action: act.BeginGeneration, again: bool, event: ev.Event
    ) -> None:
        """One generation at a time, of living members, from the newest good state."""
        assert again or action.generation not in self.begun, "a generation began twice"
        self.begun.add(action.generation)
        scaling, newest = after.settings.scaling, self._newest(before, after, event)
        assert scaling.min_workers <= len(action.members) <= scaling.max_workers
        assert action.axes in after.settings.mesh.axes, "a mesh that the job does not allow"
        assert len(action.members) % after.settings.mesh.shape(action.axes).cell == 0, "a cell is not whole"
        self._same_slices(before, after, action)
        self._fits(before, after, action)
        assert len(set(action.members)) == len(action.members), "a worker has two ranks"
        slots = {after.fleet.workers[worker].slot for worker in action.members if worker in after.fleet.workers}
        assert slots.isdisjoint(after.fleet.evicted), "a slot that is to be given back is trained on"
        going = {after.fleet.slots[slot].node for slot in slots} & after.fleet.draining.keys()
        # A generation that a restarted controller begins again may have begun before the notice.
        if going and not again:
            self.world.seen("begun on a node that is going, for want of another")
            assert not any(after.fleet.draining[node].urgent for node in going if node), "begun on a node all but gone"
            staying = [w for w in action.members if after.fleet.node_of(w) not in after.fleet.draining]
            assert len(staying) < scaling.min_workers, "a node that is going is trained on without need"
        assert action.stops_at_start == (after.gives_up_for is not None), "a run that is given up does another step"
        if after.stop_reason is not None:
            self.world.seen("a stop that keeps what is in memory only")
            assert action.checkpoint is not None, "a run that is to stop begins from nothing"
            assert is_snapshot(action.checkpoint), "a run that is to stop begins from what storage has already"
        if not again:
            assert (action.checkpoint, action.step) == (newest if newest else (None, 0))
            late = isinstance(event, ev.Tick)
            answered = isinstance(event, ev.SnapshotsReported) or before.saved.survey is None
            assert late or answered or before.members, "a generation begins before the nodes said what they hold"
            if action.checkpoint is not None and is_snapshot(action.checkpoint):
                planned = after.trouble.incident is not None and after.trouble.incident.planned
                self.world.seen("resize through memory" if planned else "recovery from memory")
            elif after.settings.snapshots.enabled and action.checkpoint and before.generation > before.first_generation:
                self.world.seen("recovery from storage although there is memory")
            if any(is_snapshot(name) for name in after.saved.rejected):
                self.world.seen("a refused snapshot")
            refused = [name for name in after.saved.rejected if not is_snapshot(name)]
            assert newest is not None or not refused, "a run began anew although its checkpoints were refused"
            remaining = set(before.members_inside) & after.fleet.workers.keys()
            assert not remaining or isinstance(before.phase, Ending | Pausing), "two generations at a time"
            for process in self.world.cluster.processes.values():
                old = process.inside and process.generation < action.generation
                assert not (old and process.worker in after.fleet.workers), (
                    "a worker is still inside an older generation"
                )

    def _fits(self, before: RunState, after: RunState, action: act.BeginGeneration) -> None:
        """No mesh needs more than there is, where one is known that does not."""
        known, limit = before.meter.measured.memory, self.world.plan.limit_bytes
        if limit is None or not known.meshes or not action.axes:
            return
        size, settings = len(action.members), after.settings
        if self.world.needed_bytes(action.axes, size) <= limit or known.fitted(size, action.axes):
            return
        self.world.seen("a mesh that needs more memory than there is, as all do")
        workers = min(size + after.idle_count, settings.scaling.max_workers)
        for axes in settings.mesh.axes:
            formed = whole_cells(workers, settings.mesh.shape(axes).cell)
            if formed < max(1, settings.scaling.min_workers):
                continue
            need = predict(known, settings.mesh, axes, formed)
            assert not known.fitted(formed, axes), "a mesh that has trained is passed over for one without the memory"
            assert need is None or need.peak_bytes > limit, "a mesh without the memory, although another one fits"

    def _same_slices(self, before: RunState, after: RunState, action: act.BeginGeneration) -> None:
        """Dropout inside layers that are cut is drawn anew with another tp: never where the last one could go on."""
        old, new = before.axes.get("tp"), action.axes.get("tp")
        if old in (None, new):
            return
        self.world.seen("another tp within the run")
        settings = after.settings
        workers = min(len(action.members) + after.idle_count, settings.scaling.max_workers)
        size = whole_cells(workers, settings.mesh.shape({**action.axes, "tp": old}).cell)
        full = any(one.axes.get("tp") == old and one.step_s is None for one in after.meter.measured.meshes)
        need = predict(after.meter.measured.memory, settings.mesh, {**action.axes, "tp": old}, size) if size else None
        full = full or (need is not None and not need.suffices)
        assert full or size < max(1, settings.scaling.min_workers), "dropout is drawn anew without need"

    def _newest(self, before: RunState, after: RunState, event: ev.Event) -> tuple[str, int] | None:
        """Computed independently: the newest snapshot of the last survey, unless storage has a newer state."""
        snapshots = [(known.id, known.step) for known in before.saved.snapshots]
        if (
            isinstance(event, ev.SnapshotsReported)
            and before.saved.survey
            and before.saved.survey.number == event.survey
        ):
            snapshots = list(event.snapshots)
        stored = [(known.id, known.step) for known in after.saved.checkpoints if known.id not in after.saved.rejected]
        sound = [
            (name, step)
            for name, step in snapshots
            if not any(parse_snapshot_id(name)[1] <= of and step > last for of, last in after.trouble.all_undone)
        ]
        fits = [known for known in sound if not self.world.saved[known[0]].meets(after.trouble.skips)]
        usable = [known for known in fits if known[0] not in after.saved.rejected][:1]
        return max(stored + usable, key=lambda known: (known[1], is_snapshot(known[0])), default=None)

    def _members(self, state: RunState) -> None:
        phase, inside = state.phase, set(state.members_inside)
        assert state.fleet.inside == inside, "somebody is inside who is no member"
        assert inside <= state.fleet.workers.keys() - state.fleet.workers.starting, (
            "a worker is inside that is not there"
        )
        assert [*state.fleet.slots, *state.fleet.workers] == [*sorted(state.fleet.slots), *sorted(state.fleet.workers)]
        assert state.idle_count == sum(len(workers) for _, workers in state.idle_slots)
        assert len(set(state.members)) == len(state.members)
        if isinstance(phase, Joining | Training):
            assert inside == set(state.members), "a generation continues without one of its members"
            assert inside
        elif isinstance(phase, Pausing | Closing):
            assert set(state.members) <= state.fleet.workers.keys(), (
                "a member is lost and the generation does not react"
            )
        elif isinstance(phase, Waiting | Finished):
            assert not state.members, "members without a generation"
        for worker in state.fleet.workers.values():
            assert worker.slot in state.fleet.slots, "a worker in a slot that is gone"

    def _slots(self, before: RunState, state: RunState) -> None:
        assert set(state.fleet.evicted) <= state.fleet.slots.keys(), "a slot that is gone is to be given back"
        if isinstance(state.phase, Training) and state.phase.first_step_done:
            assert not state.fleet.evicted, "a slow slot is kept although the others train"
        self._slots_enough(state)
        books = (len(self.requested), len(self.released))
        if (
            before.fleet.slots is state.fleet.slots
            and before.fleet.workers is state.fleet.workers
            and books == self.books
        ):
            return
        self.books = books
        assert set(state.fleet.slots) == self.requested - self.released, "a slot was lost from the books"
        counts = Counter(worker.slot for worker in state.fleet.workers.values())
        for slot in state.fleet.slots.values():
            count = counts[slot.id]
            assert count <= state.settings.scaling.workers_per_slot, "too many workers in a slot"
            full = count == state.settings.scaling.workers_per_slot
            assert (slot.phase is SlotPhase.PENDING) == (count == 0) or slot.start_failures, "an empty slot is kept"
            assert slot.phase is SlotPhase.PENDING or full or slot.start_failures, "a slot is not used"

    def _slots_enough(self, state: RunState) -> None:
        """Never more than allowed, except on draining nodes. After a cancelled drain there may be too many until the
        generation trains."""
        staying = [slot for slot in state.fleet.slots.values() if slot.node not in state.fleet.draining]
        steady = isinstance(state.phase, Training) and state.phase.first_step_done
        used = {state.fleet.workers[worker].slot for worker in state.members if worker in state.fleet.workers}
        if steady:
            # If several slots have lost a worker, the members may occupy more slots than they would fill.
            unused = [slot for slot in staying if slot.id not in used]
            assert not unused or len(staying) <= state.max_slots, "more slots than allowed, and not all are used"
        elif not self.stayed:
            assert len(staying) <= state.settings.scaling.max_slots, "more slots than allowed"
        if steady:
            going = {slot.id for slot in state.fleet.slots.values() if slot.node in state.fleet.draining}
            assert going <= used, "a slot is kept on a draining node, and no member trains there"

    def _budgets(self, state: RunState) -> None:
        streaks, limits = state.trouble.streaks, state.settings.failures
        if not isinstance(state.phase, Finished):
            # A run that is given up begins once more, to save what it has, although the failure counts too.
            once = state.gives_up_for is not None
            assert streaks.crashes <= limits.crash_streak + once, "a budget was overdrawn"
            assert streaks.user_errors <= limits.user_error_retries + once, "a budget was overdrawn"
            assert streaks.in_place < 2 + once, "fresh processes are overdue"

    def _anomalies(self, before: RunState, after: RunState) -> None:
        """Bounded, and skipped samples stay skipped; states from after an anomaly are forgotten."""
        settings = after.settings.anomalies
        for end in after.trouble.anomalies if not isinstance(after.phase, Ending | Finished) else ():
            recent = [a for a in after.trouble.anomalies if end.step - settings.window_steps < a.step <= end.step]
            if after.gives_up_for is not None:
                continue
            assert settings.policy != "stop", "the run continues although it should have stopped"
            assert len(recent) <= settings.max_anomalies or end is not after.trouble.anomalies[-1], "too many anomalies"
        for start, stop in before.trouble.skips:
            assert any(s <= start and stop <= e for s, e in after.trouble.skips), "a skipped range of samples came back"
        for known in after.saved.checkpoints:
            self.world.saved[known.id].disjoint(after.trouble.skips)

    def _incidents(self, before: RunState, after: RunState) -> None:
        if before.trouble.incident is not None and (
            after.trouble.incident is None or after.trouble.incident.id != before.trouble.incident.id
        ):
            assert before.trouble.incident.id in self.closed, "an incident vanished without a record"
        if isinstance(after.phase, Ending):
            assert after.trouble.incident is not None, "a generation fails without an incident"
        if isinstance(after.phase, Training) and after.phase.first_step_done:
            assert after.trouble.incident is None, "an incident stays open while training continues"

    def _waits_for_something(self, state: RunState) -> None:
        """Every wait has a time limit or names the party that must act."""
        phase = state.phase
        if isinstance(phase, Joining | Pausing | Ending | Closing):
            assert machine.next_deadline(state) is not None, f"{phase} may last for ever"
        if isinstance(phase, Waiting):
            pending = any(slot.phase is SlotPhase.PENDING for slot in state.fleet.slots.values())
            # The needs of other runs are checked every second.
            awaited = pending or state.fleet.slot_limit is not None or state.fleet.control_store_away
            assert awaited or machine.next_deadline(state) is not None, f"{state} waits"
            assert phase.reason, "a wait without a reason"
        if state.trouble.suspicion is not None:
            assert state.trouble.suspicion.suspects, "a suspicion of nobody"

    # --- what was reached ---

    def _remember(self, before: RunState, after: RunState, event: ev.Event, actions: tuple[act.Action, ...]) -> None:
        old, new, seen = before.phase, after.phase, self.world.seen
        if isinstance(new, Ending) and not isinstance(old, Ending):
            seen(f"failure in {type(old).__name__}")
        elif isinstance(new, Ending) and isinstance(old, Ending) and new.lost > old.lost:
            seen("loss in Ending")
        if (
            isinstance(new, Joining)
            and not isinstance(old, Joining)
            and after.trouble.incident
            and after.trouble.incident.planned
        ):
            seen("growth" if after.world_size > after.trouble.incident.world_size else "planned end without growth")
        if isinstance(new, Finished) and not isinstance(old, Finished):
            seen(f"finished: {new.status}")
            if new.status == FINISHED and isinstance(old, Waiting | Ending):
                seen("finished without its last generation")
            if new.status == STOPPED:
                seen(f"stopped in {type(old).__name__}")
        if (
            len(after.trouble.anomalies) > len(before.trouble.anomalies)
            and after.trouble.incident
            and after.trouble.incident.lost_workers
        ):
            seen("anomaly with a lost node")
        if len(after.fleet.evicted) > len(before.fleet.evicted):
            seen("eviction")
        if isinstance(new, Training) and len(after.fleet.evicted) < len(before.fleet.evicted):
            seen("slow slot given back")
        if isinstance(new, Joining) and not isinstance(old, Joining) and isinstance(old, Waiting | Pausing):
            left = after.trouble.incident and after.trouble.incident.planned and after.fleet.evicted
            if left and after.fleet.draining:
                seen("left a node that is going")
        if isinstance(new, Pausing) and new.purpose == "share" and not isinstance(old, Pausing):
            seen("room made for another run")
            left = {place for m in after.members if (place := after.fleet.workers[m].slot) not in after.fleet.evicted}
            assert len(left) >= after.settings.scaling.min_slots, "a run that trains is stopped for another one"
        if (
            before.fleet.slots
            and not after.fleet.slots
            and isinstance(new, Waiting)
            and after.fleet.slot_limit is not None
        ):
            seen("let go of everything for another run")
        if isinstance(new, Pausing) and new.purpose == "drain" and new.durable and after.settings.snapshots.enabled:
            seen("too few without the node that is going")
        if after.fleet.control_store_away:
            seen("the control store is away")
            if isinstance(new, Joining) and not isinstance(old, Joining):
                seen("begun without the control store")
        if after.trouble.false_alarms > before.trouble.false_alarms:
            seen("false alarm")
        for action in actions:
            if isinstance(action, act.ReleaseSlot) and action.cause.startswith("its node is too slow"):
                seen("left a slow node")
            if isinstance(action, act.Note):
                for phrase in ("every worker process is replaced", "falling back to", "could not be "
                               "started", "has not taken the checkpoint", "was made after an anomaly",
                               "anomalies within", "is kept: ", "it is kept", "cannot reach each other",
                               "is used again", "next one starts without them",
                               "named it", "costs less than continuing with", "no replacement has come",
                               "could not be measured", "workers are on others"):  # fmt: skip
                    if phrase in action.sentence:
                        seen(phrase)

    def at_end(self, controller: Controller) -> None:
        """All resources were released, and a run of a liveness plan has reached its end."""
        state, plan = controller.state, self.world.plan
        assert controller.over, f"the run did not end: {state.phase}"
        assert isinstance(state.phase, Finished)
        assert self.requested == self.released, "slots were not given back"
        assert not self.world.cluster.placed, "the cluster still holds slots"
        assert not self.world.cluster.pending, "the cluster still looks for slots"
        assert self.closed == set(range(1, state.trouble.incidents + 1)), "an incident has no record"
        assert not state.fleet.slots
        assert not state.fleet.workers
        if plan.liveness:
            assert state.phase.status == "finished", f"{state.phase.status}: {state.phase.reason}"
        for known in state.saved.checkpoints:
            self.world.saved[known.id].each_once(state.trouble.skips, plan.bad_batches)
        if state.phase.status == "finished":
            newest = max(step for _, step in self.world.storage.committed)
            assert newest == plan.max_steps, f"finished, but the newest checkpoint is of step {newest}"
