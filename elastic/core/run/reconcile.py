"""What follows from a state and the time, whatever event led there."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.policy.quarantine import avoided
from elastic.core.policy.scaling import ScalingFacts, ScalingPolicy, Verdict
from elastic.core.run.draining import drop_left, leave_draining, next_ripening, notices_ripen
from elastic.core.run.evictions import give_back_evicted
from elastic.core.run.generations import begin, close, start_pause
from elastic.core.run.membership import condemn, drop_worn_slots, start_failed
from elastic.core.run.reachability import newcomers_reached, unanswered
from elastic.core.run.recovery import fail_generation, finish, resolve_ending, wait
from elastic.core.run.slot_demand import keep_to_limit, make_room, why_waiting
from elastic.core.run.state import (
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
    RunState,
    Slot,
    SlotPhase,
    Training,
    Waiting,
    WorkerPhase,
)
from elastic.core.run.storage_trouble import kept_in_memory, save_without, who_cannot_save
from elastic.core.run.transition import Turn


def settle(turn: Turn, policy: ScalingPolicy) -> None:
    """Run every rule until none changes anything. Each rule moves the run forward, so this ends."""
    rules = (_suspicion, _survey, _starts, _draining, _limited, _evicted, _slots, _stage)
    for _ in range(100):
        before = turn.state
        for rule in rules:
            if not isinstance(turn.state.stage, Finished):
                rule(turn, policy)
        if turn.state is before:
            return
    raise AssertionError(f"the rules do not come to rest in {turn.state.stage}")


def next_deadline(state: RunState, policy: ScalingPolicy | None = None) -> float | None:
    """When the next Tick is due, in wall clock seconds; None when nothing depends on time.

    Always later than the Tick that was last given, so that a caller who waits for it does not spin.
    """
    failures, stage = state.settings.failures, state.stage
    times = [
        worker.since + failures.worker_start_timeout_s
        for worker in state.workers.values()
        if worker.phase is WorkerPhase.STARTING and not state.control_store_away
    ]
    if state.suspicion is not None:
        times.append(state.suspicion.deadline)
    if state.survey is not None:
        times.append(state.survey.deadline)
    if isinstance(stage, Pausing | Ending | Closing):
        times.append(stage.deadline)
    elif isinstance(stage, Joining):
        times.append(stage.since + failures.join_timeout_s)
    elif isinstance(stage, Waiting):
        if stage.not_before:
            times.append(stage.not_before)
        elif failures.capacity_timeout_s is not None and not _enough(state) and not state.control_store_away:
            times.append(stage.since + failures.capacity_timeout_s)
        times += [stage.again_at] if stage.again_at is not None else []
    if state.slots_not_before and not isinstance(stage, Finished):
        times.append(state.slots_not_before)
    times += next_ripening(state) if not isinstance(stage, Finished) else []
    pending = _pending(state)
    if pending and not state.slots_not_before:
        shut = frozenset.intersection(*(frozenset(slot.avoid) for slot in pending))
        times += [state.quarantine[node].until for node in shut if node in state.quarantine]
    return min(times, default=None)


def _suspicion(turn: Turn, policy: ScalingPolicy) -> None:
    suspicion = turn.state.suspicion
    if suspicion is None:
        return
    known = {worker: until for worker, until in suspicion.suspects.items() if worker in turn.state.workers}
    overdue = frozenset(worker for worker, until in known.items() if turn.passed(until))
    if not known:
        turn.set(suspicion=None)
    elif overdue:
        condemn(turn, overdue)
    elif len(known) < len(suspicion.suspects):
        turn.set(suspicion=replace(suspicion, suspects=known))


def _survey(turn: Turn, policy: ScalingPolicy) -> None:
    survey = turn.state.survey
    if survey is not None and turn.passed(survey.deadline):
        if isinstance(turn.state.stage, Training):
            unanswered(turn)
        else:
            turn.say("no node has said in time what its memory holds: the newest checkpoint in storage is used")
        turn.set(survey=None)


def _starts(turn: Turn, policy: ScalingPolicy) -> None:
    limit = turn.state.settings.failures.worker_start_timeout_s
    for worker in tuple(turn.state.workers.values()):
        starting = worker.phase is WorkerPhase.STARTING and not turn.state.control_store_away
        if starting and turn.passed(worker.since + limit):
            if worker.id in turn.state.workers:
                start_failed(turn, worker.id, f"not ready after {limit:.0f} s")
            if isinstance(turn.state.stage, Finished):
                return
    drop_worn_slots(turn)


def _draining(turn: Turn, policy: ScalingPolicy) -> None:
    if turn.state.draining:
        notices_ripen(turn)
    drop_left(turn)


def _limited(turn: Turn, policy: ScalingPolicy) -> None:
    keep_to_limit(turn)


def _evicted(turn: Turn, policy: ScalingPolicy) -> None:
    if turn.state.evicted:
        give_back_evicted(turn)


def _slots(turn: Turn, policy: ScalingPolicy) -> None:
    """Keep asking for as many slots as the run may use; a pending slot is the demand that an autoscaler sees."""
    if turn.state.slots_not_before and turn.passed(turn.state.slots_not_before):
        turn.set(slots_not_before=0.0)
    if _needs_no_more(turn.state):
        for slot in _pending(turn.state):
            turn.drop_slot(slot.id, "the run is coming to its end")
    elif not turn.state.slots_not_before:
        _ask_for_released(turn)
        for _ in range(_missing_slots(turn.state)):
            turn.request_slot()


def _ask_for_released(turn: Turn) -> None:
    """A node that has done its time is open again to one request at least: that one is made anew.

    Not all of them, and none when a node is to be left alone (a slot that gets it is given back): where a hundred slots
    wait and nodes fail in a burst, each failure would have them all asked for again.
    """
    pending = _pending(turn.state)
    shut = frozenset.intersection(*(frozenset(slot.avoid) for slot in pending)) if pending else frozenset()
    if shut - frozenset(avoided(turn.state.quarantine, turn.now)):
        turn.drop_slot(pending[-1].id, "it is asked for anew: a node is not to be left alone any more")


def _pending(state: RunState) -> list[Slot]:
    return [slot for slot in state.slots.values() if slot.phase is SlotPhase.PENDING]


def _needs_no_more(state: RunState) -> bool:
    over = state.stop_reason is not None or state.gives_up_for is not None
    return over or isinstance(state.stage, Closing | Finished)


def _missing_slots(state: RunState) -> int:
    # A slot on a node that is going away is replaced before it is gone.
    staying = len(state.slots)
    if state.draining:
        staying = sum(slot.node not in state.draining for slot in state.slots.values())
    return max(0, state.max_slots - staying)


def _stage(turn: Turn, policy: ScalingPolicy) -> None:
    stage = turn.state.stage
    if isinstance(stage, Waiting):
        _waiting(turn, stage, policy)
    elif isinstance(stage, Joining):
        limit = turn.state.settings.failures.join_timeout_s
        if turn.passed(stage.since + limit):
            late = [m for m in turn.state.members_inside if m not in stage.training]
            names = ", ".join(turn.name_of(m) for m in late)
            fail_generation(turn, "hang", f"not training after {limit:.0f} s: {names}")
    elif isinstance(stage, Training):
        _training(turn, stage, policy)
    elif isinstance(stage, Pausing):
        _pausing(turn, stage)
    elif isinstance(stage, Ending):
        _ending(turn, stage)
    elif isinstance(stage, Closing):
        _closing(turn, stage)


def _waiting(turn: Turn, stage: Waiting, policy: ScalingPolicy) -> None:
    state = turn.state
    newest = state.newest_checkpoint
    if state.done_step is not None and newest is not None and newest.step >= state.done_step:
        finish(turn, FINISHED, f"all {state.done_step} steps are done and saved")
    elif state.gives_up_for is not None and not _only_in_memory(state):
        finish(turn, GAVE_UP, state.gives_up_for)
    elif state.stop_reason is not None and (stage.not_before or not _only_in_memory(state)):
        finish(turn, STOPPED, state.stop_reason)
    elif not stage.not_before:
        _start(turn, stage, policy)
    elif turn.passed(stage.not_before):
        turn.enter(replace(stage, not_before=0.0))


def _start(turn: Turn, stage: Waiting, policy: ScalingPolicy) -> None:
    state = turn.state
    verdict = policy.start(_facts(state, stage.since, turn.now))
    if verdict.go and state.survey is not None:
        return  # A few milliseconds, or its deadline.
    if verdict.go and state.suspicion is None:
        begin(turn, verdict.size, verdict.reason)
        return
    if verdict.go and state.suspicion is not None:
        # A worker that may be dead is not begun with; its probe has a deadline.
        verdict = Verdict(False, f"{len(state.suspicion.suspects)} silent workers are being probed")
    verdict = replace(verdict, reason=why_waiting(state, verdict.reason))
    # Nobody can come while Ray's control store is away, so nobody is late.
    limit = None if state.control_store_away else state.settings.failures.capacity_timeout_s
    again = verdict.again_at
    again = again if again is not None and again > turn.now else None
    if limit is not None and turn.passed(stage.since + limit) and not _enough(state):
        finish(turn, NO_CAPACITY, f"after {limit:.0f} s still {verdict.reason}")
    elif (verdict.reason, again) != (stage.reason, stage.again_at):
        if verdict.reason != stage.reason:
            turn.say(verdict.reason, kind="waiting")
        turn.enter(replace(stage, reason=verdict.reason, again_at=again))


def _training(turn: Turn, stage: Training, policy: ScalingPolicy) -> None:
    state = turn.state
    if stage.completed or not stage.first_step_done:
        return
    if state.stop_reason is not None:
        start_pause(turn, "stop", state.stop_reason)
        return
    if leave_draining(turn, stage) or make_room(turn, stage):
        return
    verdict: Verdict = policy.grow(_facts(state, stage.since, turn.now))
    if verdict.go and newcomers_reached(turn):
        start_pause(turn, "grow", verdict.reason)


def _pausing(turn: Turn, stage: Pausing) -> None:
    state = turn.state
    late = turn.passed(stage.deadline)
    if state.members_inside:
        if late:
            names = ", ".join(turn.name_of(m) for m in state.members_inside)
            limit = state.settings.failures.drain_timeout_s
            fail_generation(turn, "hang", f"did not stop at a step boundary within {limit:.0f} s: {names}")
        return
    if stage.was.completed and stage.stop_at is not None:
        # The run's end came before the planned one.
        close(turn, stage.stop_at, stage.was.all_reached_end)
        return
    newest = state.newest_checkpoint
    saved = newest is not None and stage.stop_at is not None and newest.step >= stage.stop_at
    # Without `durable` the last step is in the nodes' memory, where the survey that follows finds it.
    if stage.durable and not saved and not late:
        return
    if stage.durable and not saved:
        turn.say(
            f"storage has not taken the checkpoint of step {stage.stop_at}{who_cannot_save(turn)}; "
            "steps since the one before are repeated"
        )
    turn.mark("decided", "fenced")
    turn.amend(step=state.furthest_step)
    if state.gives_up_for is not None:
        finish(turn, GAVE_UP, state.gives_up_for)
    elif stage.purpose == "stop":
        finish(turn, STOPPED, state.stop_reason or "stopped")
    else:
        wait(turn, "every member has left as planned")


def _ending(turn: Turn, stage: Ending) -> None:
    inside = turn.state.members_inside
    if not inside:
        resolve_ending(turn, stage)
    elif turn.passed(stage.deadline):
        limit = turn.state.settings.failures.abort_timeout_s
        for worker in inside:
            # Being slow is always safe: a process that does not leave is replaced, never waited for.
            evidence = f"{turn.name_of(worker)} did not leave within {limit:.1f} s"
            turn.replace_worker(worker, evidence)
            fail_generation(turn, "hang", evidence, lost=(worker,))


def _closing(turn: Turn, stage: Closing) -> None:
    newest = turn.state.newest_checkpoint
    # A function that returned before the first step has left nothing to wait for.
    saved = (newest.step if newest is not None else 0) >= stage.step
    if saved and stage.reached_end:
        finish(turn, FINISHED, f"all {stage.step} steps are done and saved")
    elif saved:
        finish(
            turn, NOT_FINISHED, f"the training function returned after {stage.step} steps, before the end of the run"
        )
    elif turn.passed(stage.deadline) and not (stage.reached_end and save_without(turn, stage)):
        what = f"training is done, but storage has not taken the checkpoint of step {stage.step}"
        finish(turn, NOT_FINISHED, what + who_cannot_save(turn))


def _only_in_memory(state: RunState) -> bool:
    """What was done would go with the nodes' memory: a generation is begun once more, which saves it as it stops.

    Only where that can be at once: not with too few workers, nor after a second failure in a row.
    """
    if not _enough(state):
        return False
    snapshot, checkpoint = state.newest_snapshot, state.newest_checkpoint
    further = snapshot is not None and snapshot.step > (checkpoint.step if checkpoint is not None else 0)
    return further or (state.survey is not None and state.settings.memory.enabled)


def _enough(state: RunState) -> bool:
    return len(state.idle) >= state.settings.scaling.min_workers


def _facts(state: RunState, since: float, now: float) -> ScalingFacts:
    phases = [worker.phase for worker in state.workers.values()]
    return ScalingFacts(
        settings=state.settings.scaling,
        now=now,
        idle=len(state.idle),
        arriving=phases.count(WorkerPhase.STARTING),
        pending_slots=sum(slot.phase is SlotPhase.PENDING for slot in state.slots.values()),
        members=state.world_size,
        waiting_since=since,
        first_start=state.generation == state.first_generation,
        # Growth waits for it only where the nodes' memory does not take the step that it begins with.
        storage_failing=state.storage_failing and not kept_in_memory(state),
    )
