"""What follows from a state and the time, whatever event led there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.policy.measured_scaling import table as costs_table
from elastic.core.policy.quarantine import avoided
from elastic.core.policy.scaling import ScalingFacts, Verdict
from elastic.core.policy.scaling_policies import policy_named
from elastic.core.run.draining import drop_left, leave_draining, next_ripening, notices_ripen
from elastic.core.run.evictions import give_back_evicted, leave_evicted
from elastic.core.run.generations import begin, close, start_pause, stop_limit_s
from elastic.core.run.membership import condemn, drop_worn_slots, next_mesh, start_failed
from elastic.core.run.phase import (
    FINISHED,
    GAVE_UP,
    NO_CAPACITY,
    NOT_FINISHED,
    STOPPED,
    Closing,
    Ending,
    Finished,
    Joining,
    Pausing,
    Training,
    Waiting,
)
from elastic.core.run.reachability import newcomers_reached, unanswered
from elastic.core.run.recovery import fail_generation, finish, record_loss, resolve_ending, wait
from elastic.core.run.slot_demand import keep_to_limit, make_room, why_waiting
from elastic.core.run.state import RunState
from elastic.core.run.storage_trouble import kept_in_memory, save_without, who_cannot_save
from elastic.core.run.transition import Transition
from elastic.core.sharding.mesh_policy import MeshVerdict, table
from elastic.core.wording import plural


def reconcile(transition: Transition) -> None:
    """Run every rule until none changes anything. Each rule moves the run forward, so this ends."""
    rules = (_suspicion, _survey, _starts, _draining, _limited, _evicted, _slots, _stage, _count_nodes)
    for _ in range(100):
        before = transition.state
        for rule in rules:
            if not isinstance(transition.state.phase, Finished):
                rule(transition)
        if transition.state is before:
            return
    raise AssertionError(f"the rules do not come to rest in {transition.state.phase}")


def next_deadline(state: RunState) -> float | None:
    """When the next Tick is due, in wall clock seconds; None when nothing depends on time.

    Always later than the Tick that was last given, so that a caller who waits for it does not spin.
    """
    failures, phase = state.settings.failures, state.phase
    times: list[float] = []
    starting = state.fleet.workers.starting
    if starting and not state.fleet.control_store_away:
        # The first one's time ends first.
        times.append(state.fleet.workers[next(iter(starting))].since + failures.worker_start_timeout_s)
    if state.trouble.suspicion is not None:
        times.append(state.trouble.suspicion.deadline)
    if state.saved.survey is not None:
        times.append(state.saved.survey.deadline)
    if isinstance(phase, Pausing | Ending | Closing):
        times.append(phase.deadline)
    elif isinstance(phase, Joining):
        times.append(phase.progress_at + failures.join_timeout_s)
    elif isinstance(phase, Waiting):
        if phase.not_before:
            times.append(phase.not_before)
        elif failures.capacity_timeout_s is not None and not _enough(state) and not state.fleet.control_store_away:
            times.append(phase.since + failures.capacity_timeout_s)
        times += [phase.again_at] if phase.again_at is not None else []
    if state.fleet.slots_not_before and not isinstance(phase, Finished):
        times.append(state.fleet.slots_not_before)
    times += next_ripening(state) if not isinstance(phase, Finished) else []
    if not state.fleet.slots_not_before:
        quarantine = state.fleet.quarantine
        times += [quarantine[node].until for node in state.fleet.slots.shut if node in quarantine]
    return min(times, default=None)


def _suspicion(transition: Transition) -> None:
    suspicion = transition.trouble.suspicion
    if suspicion is None:
        return
    known = {worker: until for worker, until in suspicion.suspects.items() if worker in transition.fleet.workers}
    overdue = frozenset(worker for worker, until in known.items() if transition.passed(until))
    if not known:
        transition.set_trouble(suspicion=None)
    elif overdue:
        condemn(transition, overdue)
    elif len(known) < len(suspicion.suspects):
        transition.set_trouble(suspicion=replace(suspicion, suspects=known))


def _survey(transition: Transition) -> None:
    survey = transition.saved.survey
    if survey is not None and transition.passed(survey.deadline):
        if isinstance(transition.state.phase, Training):
            unanswered(transition)
        else:
            transition.say("no node has reported its snapshots in time: the newest checkpoint in storage is used")
        transition.set_saved(survey=None)


def _starts(transition: Transition) -> None:
    limit = transition.state.settings.failures.worker_start_timeout_s
    # Only a Tick lets a deadline pass; thousands of workers are not looked at for every other event.
    looked_at = transition.is_tick and not transition.fleet.control_store_away
    for worker in [transition.fleet.workers[w] for w in transition.fleet.workers.starting] if looked_at else ():
        if transition.passed(worker.since + limit):
            if worker.id in transition.fleet.workers:
                start_failed(transition, worker.id, f"not ready after {limit:.0f} s")
            if isinstance(transition.state.phase, Finished):
                return
    drop_worn_slots(transition)


def _draining(transition: Transition) -> None:
    if transition.fleet.draining:
        notices_ripen(transition)
    drop_left(transition)


def _limited(transition: Transition) -> None:
    keep_to_limit(transition)


def _evicted(transition: Transition) -> None:
    if transition.fleet.evicted:
        give_back_evicted(transition)


def _slots(transition: Transition) -> None:
    """Keep asking for as many slots as the run may use; a pending slot is the demand that an autoscaler sees."""
    if transition.fleet.slots_not_before and transition.passed(transition.fleet.slots_not_before):
        transition.set_fleet(slots_not_before=0.0)
    if _needs_no_more(transition.state):
        for slot in tuple(transition.fleet.slots.pending):
            transition.drop_slot(slot, "the run is coming to its end")
    elif not transition.fleet.slots_not_before:
        _ask_for_released(transition)
        for _ in range(_missing_slots(transition.state)):
            transition.request_slot()


def _ask_for_released(transition: Transition) -> None:
    """A node that has done its time is open again to one request at least: that one is made anew.

    Not all of them, and none when a node is quarantined (a slot that gets it is given back): where a hundred slots
    wait and nodes fail in a burst, each failure would have them all asked for again.
    """
    slots = transition.fleet.slots
    if (shut := slots.shut) and shut - frozenset(avoided(transition.fleet.quarantine, transition.now)):
        transition.drop_slot(max(slots.pending), "it is requested anew: a node is no longer quarantined")


def _count_nodes(transition: Transition) -> None:
    """How many nodes the run has, and since when: what the rate of losses is measured by."""
    slots, meter = transition.fleet.slots, transition.state.meter
    placed = len(slots) - len(slots.pending)
    if placed != meter.nodes:
        transition.set(meter=meter.counted(placed, transition.now).without(slots))


def _needs_no_more(state: RunState) -> bool:
    over = state.stop_reason is not None or state.gives_up_for is not None
    return over or isinstance(state.phase, Closing | Finished)


def _missing_slots(state: RunState) -> int:
    # A slot on a node that is going away is replaced before it is gone.
    return max(0, state.max_slots - state.fleet.staying_slots)


def _stage(transition: Transition) -> None:
    phase = transition.state.phase
    if isinstance(phase, Waiting):
        _waiting(transition, phase)
    elif isinstance(phase, Joining):
        limit = transition.state.settings.failures.join_timeout_s
        if transition.passed(phase.progress_at + limit):
            late = [m for m in transition.state.members_inside if m not in phase.training]
            names = ", ".join(transition.name_of(m) for m in late)
            so_far = f", {sum(phase.restored.values())} bytes of state restored" if phase.restored else ""
            fail_generation(transition, "hang", f"not training, and no progress for {limit:.0f} s{so_far}: {names}")
    elif isinstance(phase, Training):
        _training(transition, phase)
    elif isinstance(phase, Pausing):
        _pausing(transition, phase)
    elif isinstance(phase, Ending):
        _ending(transition, phase)
    elif isinstance(phase, Closing):
        _closing(transition, phase)


def _waiting(transition: Transition, phase: Waiting) -> None:
    state = transition.state
    newest = state.saved.newest_checkpoint if state.done_step is not None else None
    if state.done_step is not None and newest is not None and newest.step >= state.done_step:
        finish(transition, FINISHED, f"all {state.done_step} steps are done and saved")
    elif state.gives_up_for is not None and not _only_in_memory(state):
        finish(transition, GAVE_UP, state.gives_up_for)
    elif state.stop_reason is not None and (phase.not_before or not _only_in_memory(state)):
        finish(transition, STOPPED, state.stop_reason)
    elif not phase.not_before:
        _start(transition, phase)
    elif transition.passed(phase.not_before):
        transition.enter(replace(phase, not_before=0.0))


def _start(transition: Transition, phase: Waiting) -> None:
    state = transition.state
    verdict = policy_named(state.settings.scaling.policy).start(_facts(state, phase.since, transition.now))
    if verdict.go and state.saved.survey is not None:
        # A few milliseconds, or its deadline. The policy's own time has passed.
        if phase.again_at is not None:
            transition.enter(replace(phase, again_at=None))
        return
    if verdict.go and state.trouble.suspicion is None:
        _say_costs(transition, verdict)
        begin(transition, verdict.size, verdict.reason)
        return
    if verdict.go and state.trouble.suspicion is not None:
        # A worker that may be dead is not begun with; its probe has a deadline.
        verdict = Verdict(False, f"{len(state.trouble.suspicion.suspects)} silent workers are being probed")
    reason = why_waiting(state, verdict.reason)
    # No worker can start while Ray's control store is away, so the limit does not apply.
    limit = None if state.fleet.control_store_away else state.settings.failures.capacity_timeout_s
    again = verdict.again_at
    again = again if again is not None and again > transition.now else None
    if limit is not None and transition.passed(phase.since + limit) and not _enough(state):
        finish(transition, NO_CAPACITY, f"after {limit:.0f} s still {reason}")
    elif (reason, again) != (phase.reason, phase.again_at):
        if reason != phase.reason:
            transition.say(reason, kind="waiting", **_costs(state, verdict))
            if verdict.chosen:
                transition.amend(action="wait for a replacement")
        transition.enter(replace(phase, reason=reason, again_at=again))


def _training(transition: Transition, phase: Training) -> None:
    state = transition.state
    if phase.completed or not phase.first_step_done:
        return
    if state.stop_reason is not None:
        start_pause(transition, "stop", state.stop_reason)
        return
    if leave_evicted(transition) or leave_draining(transition, phase) or make_room(transition, phase):
        return
    verdict = policy_named(state.settings.scaling.policy).grow(_facts(state, phase.since, transition.now))
    if verdict.go and (kept := _smaller_mesh(transition, verdict.size)) is not None:
        if verdict.size > phase.declined:
            sentence = f"no growth {state.world_size} -> {verdict.size}: {kept.chosen}: {kept.reason}"
            transition.say(sentence, kind="mesh", **table(kept))
            transition.enter(replace(phase, declined=verdict.size))
        return
    if verdict.go and newcomers_reached(transition):
        _say_costs(transition, verdict)
        start_pause(transition, "grow", verdict.reason)
    elif verdict.options and not verdict.go and verdict.size > phase.declined:
        _say_costs(transition, verdict)
        transition.enter(replace(phase, declined=verdict.size))


def _smaller_mesh(transition: Transition, size: int) -> MeshVerdict | None:
    """The choice of mesh on `size` workers where it has no more members than this generation: a worker that no mesh
    could use, or none as fast, stands by. None: there is a larger one."""
    state = transition.state
    if not state.settings.mesh.choices:
        return None
    verdict = next_mesh(transition, size, None)
    return verdict if verdict.chosen.world_size <= state.world_size else None


def _costs(state: RunState, verdict: Verdict) -> dict[str, Any]:
    return costs_table(verdict, state.meter.measured, state.settings.scaling.price_per_node_hour)


def _say_costs(transition: Transition, verdict: Verdict) -> None:
    """Only where the policy has compared any."""
    if verdict.options:
        transition.say(f"{verdict.chosen}: {verdict.reason}", kind="scaling", **_costs(transition.state, verdict))


def _pausing(transition: Transition, phase: Pausing) -> None:
    state = transition.state
    late = transition.passed(phase.deadline)
    if state.anyone_inside:
        if late:
            names = ", ".join(transition.name_of(m) for m in state.members_inside)
            limit = stop_limit_s(state.settings)
            fail_generation(transition, "hang", f"did not stop at a step boundary within {limit:.0f} s: {names}")
        return
    if phase.was.completed and phase.stop_at is not None:
        # The run's end came before the planned one.
        close(transition, phase.stop_at, phase.was.all_reached_end)
        return
    newest = state.saved.newest_checkpoint
    saved = newest is not None and phase.stop_at is not None and newest.step >= phase.stop_at
    # Without `durable` the last step is in the nodes' memory, where the survey that follows finds it.
    if phase.durable and not saved and not late:
        return
    if phase.durable and not saved:
        transition.say(
            f"storage has not taken the checkpoint of step {phase.stop_at}{who_cannot_save(transition)}; "
            "steps since the one before are repeated"
        )
    transition.mark("decided", "fenced")
    transition.amend(step=state.furthest_step)
    if state.gives_up_for is not None:
        finish(transition, GAVE_UP, state.gives_up_for)
    elif phase.purpose == "stop":
        finish(transition, STOPPED, state.stop_reason or "stopped")
    else:
        wait(transition, "every member has left as planned")


def _ending(transition: Transition, phase: Ending) -> None:
    if not transition.state.anyone_inside:
        resolve_ending(transition, phase)
    elif transition.passed(phase.deadline):
        inside = transition.state.members_inside
        limit = transition.state.settings.failures.abort_timeout_s
        for worker in inside:
            # Being slow is always safe: a process that does not leave is replaced, never waited for.
            evidence = f"{transition.name_of(worker)} did not leave within {limit:.1f} s"
            transition.replace_worker(worker, evidence)
            fail_generation(transition, "hang", evidence)
        record_loss(transition, inside)


def _closing(transition: Transition, phase: Closing) -> None:
    newest = transition.saved.newest_checkpoint
    # A function that returned before the first step has left nothing to wait for.
    saved = (newest.step if newest is not None else 0) >= phase.step
    if saved and phase.reached_end:
        finish(transition, FINISHED, f"all {phase.step} steps are done and saved")
    elif saved:
        finish(
            transition,
            NOT_FINISHED,
            f"the training function returned after {plural(phase.step, 'step')}, before the end of the run; one "
            "iteration over the loader is one epoch: `for epoch in elastic.epochs(): for batch in loader` reaches it",
        )
    elif transition.passed(phase.deadline) and not (phase.reached_end and save_without(transition, phase)):
        what = f"training is done, but storage has not taken the checkpoint of step {phase.step}"
        finish(transition, NOT_FINISHED, what + who_cannot_save(transition))


def _only_in_memory(state: RunState) -> bool:
    """What was done would go with the nodes' memory: a generation is begun once more, which saves it as it stops.

    Only where that can be at once: not with too few workers, nor after a second failure in a row.
    """
    if not _enough(state):
        return False
    snapshot, checkpoint = state.saved.newest_snapshot, state.saved.newest_checkpoint
    further = snapshot is not None and snapshot.step > (checkpoint.step if checkpoint is not None else 0)
    return further or (state.saved.survey is not None and state.settings.snapshots.enabled)


def _enough(state: RunState) -> bool:
    return state.idle_count >= state.settings.scaling.min_workers


def _facts(state: RunState, since: float, now: float) -> ScalingFacts:
    scaling, incident, meter = state.settings.scaling, state.trouble.incident, state.meter
    # A run that is coming to its end wants no more workers than it has.
    ends = state.stop_reason is not None or state.gives_up_for is not None
    lost = len(incident.lost_workers) if incident is not None and not incident.planned and not ends else 0
    lost_at = incident.times.get("symptom", since) if incident is not None else since
    most = state.max_slots * scaling.workers_per_slot
    step_s = meter.measured.step_s.get(state.world_size)
    last = state.settings.max_steps
    done = state.furthest_step if step_s is None else max(state.start_step + (now - since) / step_s, 0.0)
    return ScalingFacts(
        settings=state.settings.scaling,
        now=now,
        idle=state.idle_count,
        arriving=len(state.fleet.workers.starting),
        pending_slots=len(state.fleet.slots.pending),
        members=state.world_size,
        waiting_since=since,
        first_start=state.generation == state.first_generation,
        # Growth waits for it only where the nodes' memory does not take the step that it begins with.
        storage_failing=state.saved.storage_failing and not kept_in_memory(state),
        cells=state.settings.mesh.cells,
        measured=meter.measured,
        wanted=min(incident.world_size, scaling.max_workers, most) if incident is not None and lost else 0,
        lost=lost,
        lost_at=lost_at,
        unreplaced=sum(missing < lost_at for missing in meter.missing),
        steps_left=max(0.0, last - done) if last is not None else None,
    )
