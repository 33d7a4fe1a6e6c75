"""The rules of a run: `step(state, event, now) -> (state, actions)`, a pure function.

A turn has two halves. The event changes what is known (`_apply`); then `settle` does whatever now follows: deadlines
that have passed, slots to ask for, a generation to begin, to grow, or to end. `settle` depends on the state and
the time only, so nothing is forgotten when two events come in an unusual order; only a Tick lets a deadline pass.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import assert_never

from elastic.core import events as ev
from elastic.core.actions import (
    Action,
    AskHold,
    BeginGeneration,
    ConfirmHold,
    EndGeneration,
    FinishRun,
    RequestSlot,
    StartWorker,
    SurveyMemory,
)
from elastic.core.policy.scaling import EagerScaling, ScalingPolicy
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
from elastic.core.run.reconcile import next_deadline as next_deadline
from elastic.core.run.reconcile import settle
from elastic.core.run.recovery import end_unknown_generation, in_generation
from elastic.core.run.state import (
    Closing,
    Ending,
    Finished,
    Joining,
    KnownCheckpoint,
    Pausing,
    RunState,
    SlotPhase,
    Waiting,
    WorkerPhase,
)
from elastic.core.run.transition import Turn
from elastic.core.settings import RunSettings

DEFAULT_POLICY = EagerScaling()


def initial(settings: RunSettings, now: float) -> RunState:
    """The state before the first event, which must be RunStarted."""
    return RunState(settings=settings, stage=Waiting(now, "the run has not started"))


def step(
    state: RunState, event: ev.Event, now: float, policy: ScalingPolicy = DEFAULT_POLICY
) -> tuple[RunState, tuple[Action, ...]]:
    """One turn. `now` is wall clock seconds and never decreases. Never raises for any event in any state."""
    if isinstance(state.stage, Finished):
        return state, reissue(state) if isinstance(event, ev.ControllerRestarted) else ()
    if is_fenced(state, event):
        return state, ()
    turn = Turn(state, now, tick=isinstance(event, ev.Tick))
    _apply(turn, event)
    settle(turn, policy)
    return turn.state, tuple(turn.actions)


def is_fenced(state: RunState, event: ev.Event) -> bool:
    """True for a message of a generation that is over: the one place where such messages are dropped."""
    generation = getattr(event, "generation", None)
    return generation is not None and (generation != state.generation or not in_generation(state))


def reissue(state: RunState) -> tuple[Action, ...]:
    """The actions whose outcome is still awaited, for a controller that has just replayed its journal.

    ReleaseSlot and KillWorker leave no trace in the state: the executor ends, by itself, every slot and every worker
    that it finds alive and that the state does not know.
    """
    stage = state.stage
    actions: list[Action] = []
    per_slot = state.settings.scaling.workers_per_slot
    pending = (slot for slot in state.slots.values() if slot.phase is SlotPhase.PENDING)
    actions += [RequestSlot(slot.id, per_slot, slot.avoid) for slot in pending]
    starting = (worker for worker in state.workers.values() if worker.phase is WorkerPhase.STARTING)
    actions += [StartWorker(worker.id, worker.slot) for worker in starting]
    if isinstance(stage, Joining):
        base = state.base.id if state.base else None
        holds = state.gives_up_for is not None
        actions.append(BeginGeneration(state.generation, state.members, base, state.start_step, state.skips, holds))
    elif isinstance(stage, Ending):
        actions.append(EndGeneration(state.generation, state.members_inside, "the controller was restarted meanwhile"))
    elif isinstance(stage, Pausing) and stage.stop_at is None:
        actions.append(AskHold(state.generation, state.members_inside))
    elif isinstance(stage, Pausing) and stage.stop_at is not None:
        actions.append(ConfirmHold(state.generation, state.members_inside, stage.stop_at, stage.durable))
    if state.survey is not None:
        actions.append(SurveyMemory(state.survey.number, state.nodes, state.survey.reach))
    if isinstance(stage, Finished):
        actions.append(FinishRun(stage.status, stage.reason))
    return tuple(actions)


def _apply(turn: Turn, event: ev.Event) -> None:
    match event:
        case ev.RunStarted():
            _run_started(turn, event)
        case ev.ControllerRestarted():
            _restart_clocks(turn)
            turn.say(f"controller {event.incarnation} has taken over after a restart", kind="controller")
            _catch_up(turn, event)
            turn.actions.extend([action for action in reissue(turn.state) if action not in turn.actions])
        case ev.StopRequested():
            turn.set(stop_reason=turn.state.stop_reason or event.reason)
        case ev.Tick():
            pass
        case ev.NodesDraining():
            draining.nodes_draining(turn, event)
        case ev.CapacityJudged():
            slot_demand.capacity_judged(turn, event)
        case ev.SlotsShared():
            slot_demand.slots_shared(turn, event)
        case ev.SlotPlaced():
            membership.slot_placed(turn, event)
        case ev.SlotLost():
            membership.slot_lost(turn, event)
        case ev.WorkerReady():
            membership.worker_ready(turn, event)
        case ev.WorkerStartFailed():
            membership.worker_start_failed(turn, event)
        case ev.WorkerDied():
            membership.worker_died(turn, event)
        case ev.WorkersSilent():
            membership.workers_silent(turn, event)
        case ev.ProbeAnswered():
            membership.probe_answered(turn, event)
        case ev.MemorySurveyed():
            reachability.memory_surveyed(turn, event)
        case ev.CheckpointCommitted():
            generations.checkpoint_committed(turn, event)
        case ev.SaveFailing():
            storage_trouble.save_failing(turn, event)
        case ev.ControlStoreAway():
            control_store.away(turn, event)
        case ev.ControlStoreBack():
            control_store.back(turn, event)
        case _:
            _apply_to_generation(turn, event)


def _apply_to_generation(turn: Turn, event: ev.GenerationEvent) -> None:
    match event:
        case ev.GroupJoined():
            generations.group_joined(turn, event)
        case ev.TrainingReached():
            generations.training_reached(turn, event)
        case ev.FirstStepDone():
            generations.first_step_done(turn, event)
        case ev.ProgressStalled():
            generations.progress_stalled(turn, event)
        case ev.CollectiveFailed():
            generations.collective_failed(turn, event)
        case ev.UserCodeFailed():
            generations.user_code_failed(turn, event)
        case ev.AnomalyFound():
            anomalies.anomaly_found(turn, event)
        case ev.StepSkipped():
            anomalies.step_skipped(turn, event)
        case ev.StragglerFound():
            evictions.straggler_found(turn, event)
        case ev.RestoreFailed():
            generations.restore_failed(turn, event)
        case ev.HoldAnswered():
            generations.hold_answered(turn, event)
        case ev.MemoryLost():
            generations.memory_lost(turn, event)
        case ev.WorkerLeft():
            generations.worker_left(turn, event)
        case ev.WorkerCompleted():
            generations.worker_completed(turn, event)
        case _:
            assert_never(event)


def _restart_clocks(turn: Turn) -> None:
    """Nobody listened while the controller was away, so nobody is late: every time limit starts anew."""
    # Ray has just placed this controller, so its control store is there.
    turn.set(suspicion=None, control_store_away=False)
    failures, stage, now = turn.state.settings.failures, turn.state.stage, turn.now
    if turn.state.survey is not None:
        turn.set(survey=replace(turn.state.survey, deadline=now + failures.survey_timeout_s))
    control_store.restart_starts(turn)
    if isinstance(stage, Waiting | Joining):
        turn.enter(replace(stage, since=now))
    elif isinstance(stage, Pausing):
        turn.enter(replace(stage, deadline=now + failures.drain_timeout_s))
    elif isinstance(stage, Ending):
        turn.enter(replace(stage, deadline=now + failures.abort_timeout_s))
    elif isinstance(stage, Closing):
        turn.enter(replace(stage, deadline=now + failures.storage_timeout_s))


def _catch_up(turn: Turn, event: ev.ControllerRestarted) -> None:
    """Numbers that the controller before gave out without living to write it down are not given out again."""
    state = turn.state
    turn.set(next_slot=max(state.next_slot, event.next_slot))
    turn.set(next_worker=max(state.next_worker, event.next_worker))
    if event.newest_generation > state.generation:
        end_unknown_generation(turn, event.newest_generation)


def _run_started(turn: Turn, event: ev.RunStarted) -> None:
    if turn.state.next_slot:
        return
    known = tuple(KnownCheckpoint(name, step) for name, step in event.checkpoints)
    furthest = max((checkpoint.step for checkpoint in known), default=0)
    turn.set(
        checkpoints=known, furthest_step=furthest, stage=Waiting(turn.now, "starting"),
        generation=event.last_generation, first_generation=event.last_generation, skips=event.skips,
        started_at=turn.now,
    )  # fmt: skip
    scaling = turn.state.settings.scaling
    origin = f"from step {furthest} of an earlier run" if known else "from the beginning"
    turn.say(f"the run starts {origin} with {scaling.min_workers} to {scaling.max_workers} workers", kind="start")
