"""The rules of a run: `step(state, event, now) -> (state, actions)`, a pure function.

A transition has two halves. The event changes what is known (`_apply`); then `reconcile` does whatever now follows:
deadlines that have passed, slots to ask for, a generation to begin, to grow, or to end. `reconcile` depends on the
state and the time only, so nothing is forgotten when two events come in an unusual order; only a Tick lets a deadline
pass.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import assert_never

from elastic.core import events as ev
from elastic.core.actions import (
    Action,
    BeginGeneration,
    CommitStop,
    EndGeneration,
    FinishRun,
    ProposeStop,
    QuerySnapshots,
    RequestSlot,
    StartWorker,
)
from elastic.core.policy.measured import Measured
from elastic.core.policy.scaling_policies import policy_named
from elastic.core.run import (
    anomalies,
    control_store,
    draining,
    evictions,
    generations,
    membership,
    reachability,
    slot_demand,
    storage_trouble,
)
from elastic.core.run.phase import Closing, Ending, Finished, Joining, Pausing, Waiting
from elastic.core.run.reconcile import next_deadline as next_deadline
from elastic.core.run.reconcile import reconcile
from elastic.core.run.recovery import end_unknown_generation, in_generation
from elastic.core.run.state import KnownCheckpoint, RunState
from elastic.core.run.transition import Transition
from elastic.core.settings import RunSettings
from elastic.core.sharding.mesh_memory import HeldState
from elastic.core.typed_json import decode


def initial(settings: RunSettings, now: float) -> RunState:
    """The state before the first event, which must be RunStarted. Raises UsageError for an unknown scaling policy."""
    policy_named(settings.scaling.policy)
    return RunState(settings=settings, phase=Waiting(now, "the run has not started"))


def step(state: RunState, event: ev.Event, now: float) -> tuple[RunState, tuple[Action, ...]]:
    """One transition. `now` is wall clock seconds and never decreases. Never raises for any event in any state."""
    if isinstance(state.phase, Finished):
        return state, reissue(state) if isinstance(event, ev.ControllerRestarted) else ()
    if is_fenced(state, event):
        return state, ()
    transition = Transition(state, now, tick=isinstance(event, ev.Tick))
    _apply(transition, event)
    reconcile(transition)
    return transition.state, tuple(transition.actions)


def is_fenced(state: RunState, event: ev.Event) -> bool:
    """True for a message of a generation that is over: the one place where such messages are dropped."""
    generation = getattr(event, "generation", None)
    return generation is not None and (generation != state.generation or not in_generation(state))


def reissue(state: RunState) -> tuple[Action, ...]:
    """The actions whose outcome is still awaited, for a controller that has just replayed its journal.

    ReleaseSlot and KillWorker leave no trace in the state: the executor ends, by itself, every slot and every worker
    that it finds alive and that the state does not know.
    """
    phase = state.phase
    actions: list[Action] = []
    per_slot = state.settings.scaling.workers_per_slot
    pending = (state.fleet.slots[number] for number in state.fleet.slots.pending)
    actions += [RequestSlot(slot.id, per_slot, slot.avoid) for slot in pending]
    starting = (state.fleet.workers[number] for number in state.fleet.workers.starting)
    actions += [StartWorker(worker.id, worker.slot) for worker in starting]
    if isinstance(phase, Joining):
        base, members = state.base.id if state.base else None, tuple(state.members)
        only_saves = state.gives_up_for is not None
        actions.append(
            BeginGeneration(
                state.generation, members, base, state.start_step, state.trouble.skips, only_saves, state.axes
            )
        )
    elif isinstance(phase, Ending):
        actions.append(EndGeneration(state.generation, state.members_inside, "the controller was restarted meanwhile"))
    elif isinstance(phase, Pausing) and phase.stop_at is None:
        actions.append(ProposeStop(state.generation, state.members_inside))
    elif isinstance(phase, Pausing) and phase.stop_at is not None:
        last = phase.purpose == "stop"
        actions.append(CommitStop(state.generation, state.members_inside, phase.stop_at, phase.durable, last))
    if state.saved.survey is not None:
        actions.append(QuerySnapshots(state.saved.survey.number, state.fleet.nodes, state.saved.survey.reach))
    if isinstance(phase, Finished):
        actions.append(FinishRun(phase.status, phase.reason))
    return tuple(actions)


def _apply(transition: Transition, event: ev.Event) -> None:
    match event:
        case ev.RunStarted():
            _run_started(transition, event)
        case ev.ControllerRestarted():
            _restart_clocks(transition)
            transition.say(f"controller {event.incarnation} has taken over after a restart", kind="controller")
            _catch_up(transition, event)
            transition.actions.extend(
                [action for action in reissue(transition.state) if action not in transition.actions]
            )
        case ev.StopRequested():
            transition.set(stop_reason=transition.state.stop_reason or event.reason)
        case ev.Tick():
            pass
        case ev.NodesDraining():
            draining.nodes_draining(transition, event)
        case ev.CapacityJudged():
            slot_demand.capacity_judged(transition, event)
        case ev.SlotsShared():
            slot_demand.slots_shared(transition, event)
        case ev.SlotPlaced():
            membership.slot_placed(transition, event)
        case ev.SlotLost():
            membership.slot_lost(transition, event)
        case ev.WorkerReady():
            membership.worker_ready(transition, event)
        case ev.WorkerSettingUp():
            membership.worker_setting_up(transition, event)
        case ev.WorkerStartFailed():
            membership.worker_start_failed(transition, event)
        case ev.WorkerDied():
            membership.worker_died(transition, event)
        case ev.NodeMeasured():
            evictions.node_measured(transition, event)
        case ev.DeviceFailed():
            evictions.device_failed(transition, event)
        case ev.WorkersSilent():
            membership.workers_silent(transition, event)
        case ev.ProbeAnswered():
            membership.probe_answered(transition, event)
        case ev.SnapshotsReported():
            reachability.snapshots_reported(transition, event)
        case ev.CheckpointCommitted():
            generations.checkpoint_committed(transition, event)
        case ev.SaveFailing():
            storage_trouble.save_failing(transition, event)
        case ev.ControlStoreAway():
            control_store.away(transition, event)
        case ev.ControlStoreBack():
            control_store.back(transition, event)
        case _:
            _apply_to_generation(transition, event)


def _apply_to_generation(transition: Transition, event: ev.GenerationEvent) -> None:
    match event:
        case ev.RestoreProgressed():
            generations.restore_progressed(transition, event)
        case ev.SetUpProgressed():
            generations.set_up_progressed(transition, event)
        case ev.GroupJoined():
            generations.group_joined(transition, (event.worker,))
        case ev.TrainingReached():
            generations.training_reached(transition, (event.worker,))
        case ev.FirstStepDone():
            generations.first_step_done(transition, event)
        case ev.StepTimeMeasured():
            size, axes = transition.state.world_size, transition.state.axes
            transition.set(meter=transition.state.meter.stepped(size, event.step_s).tried(size, axes, event.step_s))
        case ev.MemoryMeasured():
            _memory_measured(transition, event)
        case ev.ProgressStalled():
            generations.progress_stalled(transition, event)
        case ev.CollectiveFailed():
            generations.collective_failed(transition, event)
        case ev.UserCodeFailed():
            generations.user_code_failed(transition, event)
        case ev.MeshRefused():
            generations.mesh_refused(transition, event)
        case ev.AnomalyFound():
            anomalies.anomaly_found(transition, event)
        case ev.AuditFailed():
            anomalies.audit_failed(transition, event)
        case ev.StepSkipped():
            anomalies.step_skipped(transition, event)
        case ev.StragglerFound():
            evictions.straggler_found(transition, event)
        case ev.CollectivesSlowed():
            evictions.collectives_slowed(transition, event)
        case ev.RestoreFailed():
            generations.restore_failed(transition, event)
        case ev.StopPromised():
            generations.stop_promised(transition, (event.worker,), (event.step,), event.memory)
        case ev.MemoryLost():
            generations.memory_lost(transition, event)
        case ev.WorkerLeft():
            generations.workers_left(transition, (event.worker,), (event.step,))
        case ev.WorkerCompleted():
            generations.worker_completed(transition, event)
        case ev.MembersReported():
            generations.members_reported(transition, event)
        case _:
            assert_never(event)


def _memory_measured(transition: Transition, event: ev.MemoryMeasured) -> None:
    state = transition.state
    try:
        held = decode(HeldState, event.held)
    except (ValueError, TypeError, KeyError):
        # Another release has written it.
        return
    meter = state.meter.remembered(state.world_size, state.axes, event.limit_bytes, event.rest_bytes, held)
    transition.set(meter=meter)
    # By what is known now; and stages are cut here for each mesh, not while a recovery waits for it.
    membership.say_outlook(transition)


def _restart_clocks(transition: Transition) -> None:
    """No message was read while the controller was away, so every time limit begins anew."""
    # Ray has just placed this controller, so its control store is there.
    transition.set_trouble(suspicion=None)
    transition.set_fleet(control_store_away=False)
    failures, phase, now = transition.state.settings.failures, transition.state.phase, transition.now
    if transition.saved.survey is not None:
        transition.set_saved(survey=replace(transition.saved.survey, deadline=now + failures.survey_timeout_s))
    control_store.restart_starts(transition)
    if isinstance(phase, Waiting | Joining):
        transition.enter(replace(phase, since=now))
    elif isinstance(phase, Pausing):
        transition.enter(replace(phase, deadline=now + generations.stop_limit_s(transition.state.settings)))
    elif isinstance(phase, Ending):
        transition.enter(replace(phase, deadline=now + failures.abort_timeout_s))
    elif isinstance(phase, Closing):
        transition.enter(replace(phase, deadline=now + failures.storage_timeout_s))


def _catch_up(transition: Transition, event: ev.ControllerRestarted) -> None:
    """Numbers that the previous controller used, but died before it could journal them, are not used again."""
    state = transition.state
    transition.set_fleet(next_slot=max(state.fleet.next_slot, event.next_slot))
    transition.set_fleet(next_worker=max(state.fleet.next_worker, event.next_worker))
    if event.newest_generation > state.generation:
        end_unknown_generation(transition, event.newest_generation, "workers know of")


def _run_started(transition: Transition, event: ev.RunStarted) -> None:
    if transition.fleet.next_slot:
        return
    known = tuple(KnownCheckpoint(name, step) for name, step in event.checkpoints)
    furthest = max((checkpoint.step for checkpoint in known), default=0)
    transition.set_saved(checkpoints=known)
    transition.set(
        furthest_step=furthest,
        phase=Waiting(transition.now, "starting"),
        generation=event.last_generation,
        first_generation=event.last_generation,
        started_at=transition.now,
    )
    transition.set_trouble(skips=event.skips, undone=event.undone)
    transition.set(meter=replace(transition.state.meter, measured=_of_earlier_attempts(event)))
    scaling, mesh = transition.state.settings.scaling, transition.state.settings.mesh
    sizes = " or ".join(map(str, mesh.cells))
    cells = f", in cells of {sizes} ({mesh})" if mesh.cell > 1 else ""
    rounded = f"; {mesh.rounded}" if mesh.rounded else ""
    unlike = f"; {mesh.unlike}" if mesh.unlike else ""
    origin = f"from step {furthest} of an earlier run" if known else "from the beginning"
    transition.say(
        f"the run starts {origin} with {scaling.min_workers} to {scaling.max_workers} workers{cells}{rounded}{unlike}",
        kind="start",
    )


def _of_earlier_attempts(event: ev.RunStarted) -> Measured:
    """What another release has measured otherwise is measured anew."""
    try:
        return decode(Measured, event.measured) if event.measured is not None else Measured()
    except (ValueError, TypeError, KeyError):
        return Measured()
