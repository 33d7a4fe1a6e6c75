"""A generation from its begin to its planned end, completion or failure."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.actions import AskHold, BeginGeneration, ConfirmHold
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.events import (
    CheckpointCommitted,
    CollectiveFailed,
    FirstStepDone,
    GroupJoined,
    HoldAnswered,
    MemoryLost,
    ProgressStalled,
    RestoreFailed,
    TrainingReached,
    UserCodeFailed,
    WorkerCompleted,
    WorkerLeft,
)
from elastic.core.run.anomaly import counts
from elastic.core.run.recovery import backdate, close_incident, fail_generation, open_incident, reject_checkpoint
from elastic.core.run.state import Closing, Ending, Joining, KnownCheckpoint, Pausing, Training, WorkerPhase
from elastic.core.run.transition import Turn

_KEPT = 100


def begin(turn: Turn, size: int, reason: str) -> None:
    """Start the next generation on the first `size` idle workers, from the newest good state."""
    members = tuple(worker.id for worker in turn.idle_workers()[:size])
    base = turn.state.newest_state
    step = base.step if base else 0
    number = turn.state.generation + 1
    repeated = max(0, turn.state.furthest_step - step)
    turn.mark("decided", "fenced")
    turn.amend(
        next_generation=number, next_world_size=size, resumed_step=step, steps_repeated=repeated,
        source=source_of(base),
    )  # fmt: skip
    turn.set(
        generation=number, members=members, base=base, start_step=step, done_step=None,
        # Writes of earlier generations that still failed are over; this one's own will tell.
        storage_failing=False, cannot_save=(), snapshots=(), survey=None, reached=frozenset(),
    )  # fmt: skip
    turn.set_phase(members, WorkerPhase.MEMBER)
    turn.enter(Joining(turn.now))
    origin = f"{source_of(base)}, {base.id}, step {step}" if base else "the beginning"
    turn.say(
        f"generation {number} begins with {size} workers from {origin}: {reason}"
        + (f"; {repeated} steps will be repeated" if repeated else ""),
        number=number, world_size=size, step=step,
    )  # fmt: skip
    holds = turn.state.gives_up_for is not None
    turn.do(BeginGeneration(number, members, base.id if base else None, step, turn.state.skips, holds))


def source_of(base: KnownCheckpoint | None) -> str:
    if base is None:
        return "fresh start"
    return "memory" if is_snapshot(base.id) else "storage"


def group_joined(turn: Turn, event: GroupJoined) -> None:
    stage = turn.state.stage
    if not isinstance(stage, Joining) or event.worker not in turn.state.members:
        return
    joined = stage.joined | {event.worker}
    turn.enter(replace(stage, joined=joined))
    if len(joined) == turn.state.world_size:
        turn.mark("group_ready")


def training_reached(turn: Turn, event: TrainingReached) -> None:
    stage = turn.state.stage
    if not isinstance(stage, Joining) or event.worker not in turn.state.members:
        return
    ready = stage.training | {event.worker}
    turn.enter(replace(stage, joined=stage.joined | {event.worker}, training=ready))
    if len(ready) == turn.state.world_size:
        turn.mark("group_ready", "state_ready")
        turn.enter(Training(turn.now))
        if turn.state.gives_up_for is not None:
            _save_only(turn)


def _save_only(turn: Turn) -> None:
    """All members hold where they have begun: that is where they stop, and what storage is to have."""
    state, stage = turn.state, turn.state.stage
    assert isinstance(stage, Training)
    limit, at = turn.now + state.settings.failures.drain_timeout_s, state.start_step
    answers = dict.fromkeys(state.members, at)
    turn.enter(Pausing(turn.now, limit, "stop", was=stage, answers=answers, stop_at=at, durable=True))
    turn.do(ConfirmHold(state.generation, state.members, at, True))


def first_step_done(turn: Turn, event: FirstStepDone) -> None:
    stage = turn.state.stage
    if isinstance(stage, Joining):
        # The reports of a quick first step may overtake the last sign of readiness.
        turn.mark("group_ready", "state_ready")
        stage = Training(turn.now)
    if not isinstance(stage, Training) or stage.first_step_done:
        return
    turn.enter(replace(stage, first_step_done=True))
    turn.set(furthest_step=max(turn.state.furthest_step, event.step))
    turn.mark("first_step")
    incident = turn.state.incident
    if incident is not None:
        seconds = turn.now - incident.times["symptom"]
        turn.say(
            f"{incident.kind} is over: first step after {seconds:.2f} s at world size {turn.state.world_size}, "
            f"{incident.steps_repeated} steps repeated",
            kind="recovered",
        )
    close_incident(turn)


def start_pause(turn: Turn, purpose: str, reason: str, durable: bool | None = None) -> None:
    """Ask every member to promise a step; the largest promise is where all will stop.

    `durable`: wait for storage to have that step (None: only where memory does not take it).
    """
    stage = turn.state.stage
    assert isinstance(stage, Training)
    kind = "stop" if purpose == "stop" else "resize"
    open_incident(turn, kind, reason, turn.state.furthest_step, planned=True)
    limit = turn.now + turn.state.settings.failures.drain_timeout_s
    durable = not turn.state.settings.memory.enabled if durable is None else durable
    turn.enter(Pausing(turn.now, limit, purpose, was=stage, durable=durable))
    turn.say(f"generation {turn.state.generation} will end at a step boundary: {reason}")
    turn.do(AskHold(turn.state.generation, turn.state.members))


def hold_answered(turn: Turn, event: HoldAnswered) -> None:
    stage = turn.state.stage
    if not isinstance(stage, Pausing) or stage.stop_at is not None or event.worker not in turn.state.members:
        return
    # A run that stops for good needs the checkpoint in storage; so does one whose memory does not take it everywhere.
    durable = stage.durable or stage.purpose == "stop" or not event.memory
    _promised(turn, replace(stage, durable=durable), event.worker, event.step)


def _promised(turn: Turn, stage: Pausing, worker: int, step: int) -> None:
    answers = {**stage.answers, worker: step}
    turn.enter(replace(stage, answers=answers))
    if len(answers) == turn.state.world_size:
        stop_at = max(answers.values())
        turn.enter(replace(stage, answers=answers, stop_at=stop_at))
        turn.do(ConfirmHold(turn.state.generation, turn.state.members_inside, stop_at, stage.durable))


def memory_lost(turn: Turn, event: MemoryLost) -> None:
    """Told by every member; said once."""
    if turn.state.memory_lost_in < event.generation:
        turn.set(memory_lost_in=event.generation)
        turn.say(
            f"no more snapshots are taken into memory: {event.reason}; a failure now goes back to storage",
            kind="memory",
        )


def worker_left(turn: Turn, event: WorkerLeft) -> None:
    state, stage = turn.state, turn.state.stage
    if event.worker not in state.members_inside:
        return
    turn.set(furthest_step=max(state.furthest_step, event.step))
    planned = isinstance(stage, Pausing) and event.step == stage.stop_at
    if not planned and not isinstance(stage, Ending):
        fail_generation(
            turn, "collective-failed", f"{turn.name_of(event.worker)} left without being told to", event.step
        )
    turn.set_phase((event.worker,), WorkerPhase.IDLE)


def worker_completed(turn: Turn, event: WorkerCompleted) -> None:
    """The training function has returned on one member, which is thereby out of the generation."""
    stage = turn.state.stage
    if event.worker not in turn.state.members_inside:
        return
    turn.set(furthest_step=max(turn.state.furthest_step, event.step))
    if isinstance(stage, Ending):
        turn.set_phase((event.worker,), WorkerPhase.IDLE)
        return
    if isinstance(stage, Joining):
        stage = Training(turn.now)
    running = stage.was if isinstance(stage, Pausing) else stage
    if not isinstance(running, Training):
        return
    running = replace(
        running,
        completed=running.completed | {event.worker},
        all_reached_end=running.all_reached_end and event.reached_end,
    )
    if isinstance(stage, Pausing):
        # Its end came before the question: it has stopped, and where it stopped is its promise.
        turn.enter(replace(stage, was=running))
        turn.set_phase((event.worker,), WorkerPhase.IDLE)
        if stage.stop_at is None:
            _promised(turn, replace(stage, was=running, durable=True), event.worker, event.step)
    else:
        turn.enter(running)
    if running.completed >= set(turn.state.members):
        close(turn, event.step, running.all_reached_end)


def close(turn: Turn, step: int, reached_end: bool) -> None:
    """Every member is done: what is left is the checkpoint of the last step."""
    close_incident(turn)
    deadline = turn.now + turn.state.settings.failures.storage_timeout_s
    turn.set(done_step=step if reached_end else None)
    turn.enter(Closing(turn.now, deadline, step, reached_end))


def collective_failed(turn: Turn, event: CollectiveFailed) -> None:
    if event.worker in turn.state.members:
        who = turn.name_of(event.worker)
        fail_generation(turn, "collective-failed", f"{who} reports at step {event.step}: {event.error}", event.step)


def user_code_failed(turn: Turn, event: UserCodeFailed) -> None:
    if event.worker not in turn.state.members:
        return
    who = turn.name_of(event.worker)
    kind = "usage-error" if event.usage else "user-error"
    evidence = event.error if event.usage else f"{who}, step {event.step}: {event.error}"
    turn.say(f"the training function raised on {who}: {event.error}", kind="user-error", traceback=event.traceback)
    fail_generation(turn, kind, evidence, event.step)
    stage = turn.state.stage
    if isinstance(stage, Ending):
        turn.enter(replace(stage, raised=stage.raised | {event.worker}))


def restore_failed(turn: Turn, event: RestoreFailed) -> None:
    if event.worker not in turn.state.members:
        return
    if event.checkpoint:
        reject_checkpoint(turn, event.checkpoint, event.error)
    fail_generation(turn, "restore-failed", f"{event.checkpoint or source_of(turn.state.base)}: {event.error}")


def progress_stalled(turn: Turn, event: ProgressStalled) -> None:
    """Nobody is silent and nothing moves: all are told to leave, and who does not is replaced."""
    if isinstance(turn.state.stage, Ending):
        return
    evidence = f"no step has ended for {event.stalled_s:.1f} s after step {event.step} (limit {event.limit_s:.1f} s)"
    fail_generation(turn, "hang", evidence, event.step)
    backdate(turn, event.stalled_s)


def checkpoint_committed(turn: Turn, event: CheckpointCommitted) -> None:
    if not counts(turn.state, event.by_generation, event.step):
        turn.say(f"checkpoint {event.checkpoint} came late and does not count: it lies behind an anomaly", "anomaly")
        return
    known = KnownCheckpoint(event.checkpoint, event.step)
    if known not in turn.state.checkpoints:
        # Retention keeps fewer than these; a list that grew for months would slow every turn.
        turn.set(checkpoints=(known, *turn.state.checkpoints[: _KEPT - 1]))
    turn.set(furthest_step=max(turn.state.furthest_step, event.step))
    if turn.state.storage_failing:
        turn.say(f"storage takes checkpoints again: {event.checkpoint}", kind="storage")
    turn.set(storage_failing=False, cannot_save=())
