"""Transitions of one generation: start, planned end, completion and failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic.core.actions import BeginGeneration, CommitStop, ProposeStop
from elastic.core.checkpoint.rounds import Rounds
from elastic.core.checkpoint.snapshots import Copies, is_snapshot
from elastic.core.events import (
    CheckpointCommitted,
    CollectiveFailed,
    FirstStepDone,
    GroupJoined,
    MembersReported,
    MemoryLost,
    MeshRefused,
    ProgressStalled,
    RestoreFailed,
    RestoreProgressed,
    SetUpProgressed,
    StopPromised,
    TrainingReached,
    UserCodeFailed,
    WorkerCompleted,
    WorkerLeft,
)
from elastic.core.fleet import Members
from elastic.core.mesh import DRAWN_ANEW
from elastic.core.run.membership import next_mesh, ranked, say_outlook
from elastic.core.run.phase import Closing, Ending, Joining, Pausing, Training
from elastic.core.run.recovery import (
    backdate,
    close_incident,
    end_found_generation,
    fail_generation,
    open_incident,
    reject_checkpoint,
)
from elastic.core.run.state import KnownCheckpoint, RunState
from elastic.core.run.transition import Transition
from elastic.core.settings import RunSettings
from elastic.core.sharding.mesh_policy import table
from elastic.core.tables import Amounts
from elastic.core.wording import plural

_KEPT = 100
# What torch says, of a device and of a host.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def begin(transition: Transition, size: int, reason: str) -> None:
    """Start the next generation on `size` idle workers, from the newest good state."""
    base = transition.saved.newest_state
    mesh = next_mesh(transition, size, base)
    size, axes, meter = mesh.chosen.world_size, mesh.chosen.axes, transition.state.meter
    members = ranked(transition, size, base, transition.state.settings.mesh.shape(axes))
    step = base.step if base else 0
    number = transition.state.generation + 1
    repeated = max(0, transition.state.furthest_step - step)
    transition.mark("decided", "fenced")
    transition.amend(
        next_generation=number, next_world_size=size, resumed_step=step, steps_repeated=repeated,
        source=source_of(base),
    )  # fmt: skip
    if axes:
        # Before the first step nothing has been drawn.
        before = transition.state.axes.get("tp") if max(step, transition.state.furthest_step) > 0 else None
        other = before is not None and axes["tp"] != before
        transition.say(
            f"generation {number} trains on {mesh.chosen}: {mesh.reason}" + (f"; {DRAWN_ANEW}" if other else ""),
            kind="mesh", **table(mesh),
        )  # fmt: skip
    transition.set(generation=number, members=Members(members), base=base, start_step=step, done_step=None, axes=axes)
    transition.set(meter=replace(meter, begun_at=transition.now))
    # Forget failed writes of earlier generations: this generation's own writes count.
    transition.set_saved(storage_failing=False, cannot_save=(), snapshots=(), copies=Copies(), survey=None)
    transition.set_fleet(reached=frozenset())
    transition.enter_generation(members)
    transition.enter(Joining(transition.now))
    origin = f"{source_of(base)}, {base.id}, step {step}" if base else "the beginning"
    transition.say(
        f"generation {number} begins with {plural(size, 'worker')} from {origin}: {reason}"
        + (f"; {plural(repeated, 'step')} will be repeated" if repeated else "")
        + _outer_steps_lost(transition.state, step)
        + _smaller_batch(transition.state, size),
        number=number, world_size=size, step=step,
    )  # fmt: skip
    only_saves = transition.state.gives_up_for is not None
    transition.do(
        BeginGeneration(number, members, base.id if base else None, step, transition.trouble.skips, only_saves, axes)
    )


def source_of(base: KnownCheckpoint | None) -> str:
    if base is None:
        return "fresh start"
    return "memory" if is_snapshot(base.id) else "storage"


def members_reported(transition: Transition, event: MembersReported) -> None:
    """As if each report had come as an event of its own: no rule has anything to do between two of them."""
    if event.report == GroupJoined.__name__:
        group_joined(transition, event.workers)
    elif event.report == TrainingReached.__name__:
        training_reached(transition, event.workers)
    elif event.report == StopPromised.__name__:
        stop_promised(transition, event.workers, event.steps, event.memory)
    elif event.report == WorkerLeft.__name__:
        workers_left(transition, event.workers, event.steps)


def group_joined(transition: Transition, workers: Iterable[int]) -> None:
    phase, members = transition.state.phase, transition.state.members
    known = [worker for worker in workers if worker in members]
    if not isinstance(phase, Joining) or not known:
        return
    joined = phase.joined.plus(known)
    transition.enter(replace(phase, joined=joined))
    if len(joined) == transition.state.world_size:
        transition.mark("group_ready")


def restore_progressed(transition: Transition, event: RestoreProgressed) -> None:
    """Only new bytes count: reading the same ones again and again is no progress."""
    phase = transition.state.phase
    if not isinstance(phase, Joining) or event.bytes <= phase.restored.get(event.worker, 0):
        return
    restored = phase.restored.put({event.worker: event.bytes})
    transition.enter(replace(phase, restored=restored, moved_at=transition.now))


def set_up_progressed(transition: Transition, event: SetUpProgressed) -> None:
    """Progress of a member that does not train yet; members that train already only wait for it."""
    phase, members = transition.state.phase, transition.state.members
    if isinstance(phase, Joining) and event.worker in members and event.worker not in phase.training:
        transition.enter(replace(phase, moved_at=transition.now))


def training_reached(transition: Transition, workers: Iterable[int]) -> None:
    phase, members = transition.state.phase, transition.state.members
    known = [worker for worker in workers if worker in members]
    if not isinstance(phase, Joining) or not known:
        return
    ready = phase.training.plus(known)
    transition.enter(replace(phase, joined=phase.joined.plus(known), training=ready))
    if len(ready) == transition.state.world_size:
        transition.mark("group_ready", "state_ready")
        transition.enter(Training(transition.now))
        if transition.state.gives_up_for is not None:
            _save_only(transition)


def _save_only(transition: Transition) -> None:
    """The members wait at the step where they started: stop them there, and save that step to storage."""
    state, phase = transition.state, transition.state.phase
    assert isinstance(phase, Training)
    limit, at = transition.now + state.settings.failures.drain_timeout_s, state.start_step
    answers = Amounts(dict.fromkeys(state.members, at))
    transition.enter(Pausing(transition.now, limit, "stop", was=phase, answers=answers, stop_at=at, durable=True))
    transition.do(CommitStop(state.generation, tuple(state.members), at, True, last=True))


def first_step_done(transition: Transition, event: FirstStepDone) -> None:
    phase = transition.state.phase
    if isinstance(phase, Joining):
        # The report of a quick first step may arrive before the last TrainingReached.
        transition.mark("group_ready", "state_ready")
        phase = Training(transition.now)
    if not isinstance(phase, Training) or phase.first_step_done:
        return
    transition.enter(replace(phase, first_step_done=True))
    transition.set(furthest_step=max(transition.state.furthest_step, event.step))
    transition.mark("first_step")
    incident = transition.trouble.incident
    if incident is not None:
        seconds = transition.now - incident.times["symptom"]
        transition.say(
            f"{incident.kind} is over: first step after {seconds:.2f} s at world size {transition.state.world_size}, "
            f"{plural(incident.steps_repeated, 'step')} repeated",
            kind="recovered",
        )
        transition.set(meter=transition.state.meter.recovered(incident, transition.now))
    close_incident(transition)
    say_outlook(transition)


def start_pause(transition: Transition, purpose: str, reason: str, durable: bool | None = None) -> None:
    """Ask every member to promise a step; all members stop at the largest promised step.

    `durable`: wait until storage has that step (None: only if it cannot be kept in the nodes' memory).
    """
    phase = transition.state.phase
    assert isinstance(phase, Training)
    kind = "stop" if purpose == "stop" else "resize"
    open_incident(transition, kind, reason, transition.state.furthest_step, planned=True)
    limit = transition.now + stop_limit_s(transition.state.settings)
    durable = not transition.state.settings.snapshots.enabled if durable is None else durable
    transition.enter(Pausing(transition.now, limit, purpose, was=phase, durable=durable))
    transition.say(f"generation {transition.state.generation} will end at a step boundary: {reason}")
    transition.do(ProposeStop(transition.state.generation, tuple(transition.state.members)))


def _smaller_batch(state: RunState, size: int) -> str:
    """Of `size` workers, where the batch follows their number."""
    most = state.settings.scaling.max_workers
    if state.settings.adaptive_batch is None or size == most:
        return ""
    return f", steps of {size}/{most} of the configured batch, with a learning rate to match"


def _outer_steps_lost(state: RunState, step: int) -> str:
    """For a generation that begins after `step`, where islands train by themselves."""
    asked = state.settings.communication
    if asked is None or asked.semantics != "local":
        return ""
    lost = Rounds.of(asked).outer_steps(step, state.furthest_step)
    return f", and with them the outer steps of {', '.join(map(str, lost))}" if lost else ""


def stop_limit_s(settings: RunSettings) -> float:
    """How long members may take to stop. Where islands train by themselves that is a round."""
    return settings.failures.drain_timeout_s * Rounds.of(settings.communication).longest_wait


def stop_promised(transition: Transition, workers: Sequence[int], steps: Sequence[int], memory: bool) -> None:
    phase, members = transition.state.phase, transition.state.members
    if not isinstance(phase, Pausing) or phase.stop_at is not None:
        return
    promises: dict[int, int] = {}
    lacking = len(members) - len(phase.answers)
    for worker, step in zip(workers, steps, strict=True):
        if worker in members and lacking:
            lacking -= worker not in phase.answers and worker not in promises
            promises[worker] = step
    if not promises:
        return
    # A run that stops for good needs the checkpoint in storage, and so does one with a node that takes no snapshots.
    durable = phase.durable or phase.purpose == "stop" or not memory
    _promised(transition, replace(phase, durable=durable), promises)


def _promised(transition: Transition, phase: Pausing, promises: Mapping[int, int]) -> None:
    answers = phase.answers.put(promises)
    transition.enter(replace(phase, answers=answers))
    if len(answers) == transition.state.world_size:
        stop_at = max(answers.values())
        transition.enter(replace(phase, answers=answers, stop_at=stop_at))
        last = phase.purpose == "stop"
        members = transition.state.members_inside
        transition.do(CommitStop(transition.state.generation, members, stop_at, phase.durable, last))


def memory_lost(transition: Transition, event: MemoryLost) -> None:
    """Every member reports it; only the members that have failed give a reason. Noted once."""
    if not event.reason or transition.saved.memory_lost_in >= event.generation:
        return
    transition.set_saved(memory_lost_in=event.generation)
    lost = f"no more snapshots are taken into memory: {transition.name_of(event.worker)} reports: {event.reason}"
    if transition.state.settings.snapshots.required:
        fail_generation(transition, "usage-error", f"{lost}; the job's snapshots.required ends the run")
    else:
        transition.say(f"{lost}; a failure now goes back to storage", kind="memory")


def workers_left(transition: Transition, workers: Sequence[int], steps: Sequence[int]) -> None:
    """Each after its step, in the order in which they have reported it; of one worker the first report counts."""
    first = dict(zip(reversed(workers), reversed(steps), strict=True))
    inside = {worker: first[worker] for worker in transition.fleet.inside.among(workers)}
    stop_at = phase.stop_at if isinstance(phase := transition.state.phase, Pausing) else None
    unasked = None
    if not isinstance(phase, Ending):
        unasked = next((worker for worker, step in inside.items() if step != stop_at), None)
    if unasked is not None:
        order = list(inside)
        _become_idle(transition, {worker: inside.pop(worker) for worker in order[: order.index(unasked)]})
        step = inside[unasked]
        transition.set(furthest_step=max(transition.state.furthest_step, step))
        who = transition.name_of(unasked)
        fail_generation(transition, "collective-failed", f"{who} left without a request", step)
    _become_idle(transition, inside)


def _become_idle(transition: Transition, left: Mapping[int, int]) -> None:
    """These members have left, each after its step."""
    if left:
        transition.set(furthest_step=max(transition.state.furthest_step, *left.values()))
        transition.leave_generation(left)


def worker_completed(transition: Transition, event: WorkerCompleted) -> None:
    """The training function has returned on one member, which leaves the generation with it."""
    phase = transition.state.phase
    if not transition.state.is_inside(event.worker):
        return
    transition.set(furthest_step=max(transition.state.furthest_step, event.step))
    if isinstance(phase, Ending):
        transition.leave_generation((event.worker,))
        return
    if isinstance(phase, Joining):
        phase = Training(transition.now)
    running = phase.was if isinstance(phase, Pausing) else phase
    if not isinstance(running, Training):
        return
    running = replace(
        running,
        completed=running.completed.plus((event.worker,)),
        all_reached_end=running.all_reached_end and event.reached_end,
    )
    if isinstance(phase, Pausing):
        # It ended before it was asked: the step where it stopped counts as its promise.
        transition.enter(replace(phase, was=running))
        transition.leave_generation((event.worker,))
        if phase.stop_at is None:
            _promised(transition, replace(phase, was=running, durable=True), {event.worker: event.step})
    else:
        transition.enter(running)
    if len(running.completed) == transition.state.world_size:
        close(transition, event.step, running.all_reached_end)


def close(transition: Transition, step: int, reached_end: bool) -> None:
    """Every member is done: wait for the checkpoint of the last step."""
    close_incident(transition)
    deadline = transition.now + transition.state.settings.failures.storage_timeout_s
    transition.set(done_step=step if reached_end else None)
    transition.enter(Closing(transition.now, deadline, step, reached_end))


def collective_failed(transition: Transition, event: CollectiveFailed) -> None:
    if event.worker in transition.state.members:
        who = transition.name_of(event.worker)
        fail_generation(
            transition, "collective-failed", f"{who} reports at step {event.step}: {event.error}", event.step
        )


def user_code_failed(transition: Transition, event: UserCodeFailed) -> None:
    if event.worker not in transition.state.members:
        return
    state, who = transition.state, transition.name_of(event.worker)
    kind = "usage-error" if event.usage else "user-error"
    if any(words in event.error.lower() for words in _OUT_OF_MEMORY) and state.axes:
        transition.set(meter=state.meter.tried(state.world_size, state.axes, None))
        others = next_mesh(transition, state.world_size, None).candidates
        # Another mesh may suffice, so it is not the end that an error of the code would be.
        kind = kind if all(one.refusal for one in others) else "out-of-memory"
    evidence = event.error if event.usage else f"{who}, step {event.step}: {event.error}"
    transition.say(
        f"the training function raised on {who}: {event.error}", kind="user-error", traceback=event.traceback
    )
    fail_generation(transition, kind, evidence, event.step)
    phase = transition.state.phase
    if isinstance(phase, Ending):
        transition.enter(replace(phase, raised=phase.raised.plus((event.worker,))))


def mesh_refused(transition: Transition, event: MeshRefused) -> None:
    """Its size of `tp` is left out from here on, which ends the run where no other is left."""
    state = transition.state
    if event.worker not in state.members:
        return
    transition.set(meter=state.meter.refused(state.axes["tp"]))
    others = next_mesh(transition, state.world_size, None).candidates
    kind = "usage-error" if all(one.refusal for one in others) else "mesh-refused"
    fail_generation(transition, kind, event.error, event.step)


def restore_failed(transition: Transition, event: RestoreFailed) -> None:
    if event.worker not in transition.state.members:
        return
    if event.checkpoint:
        reject_checkpoint(transition, event.checkpoint, event.error)
    fail_generation(
        transition, "restore-failed", f"{event.checkpoint or source_of(transition.state.base)}: {event.error}"
    )


def progress_stalled(transition: Transition, event: ProgressStalled) -> None:
    """Hang: heartbeats continue but no step finishes. End the generation; members that do not leave are replaced."""
    if isinstance(transition.state.phase, Ending):
        return
    evidence = f"no step has ended for {event.stalled_s:.1f} s after step {event.step} (limit {event.limit_s:.1f} s)"
    fail_generation(transition, "hang", evidence, event.step)
    backdate(transition, event.stalled_s)


def checkpoint_committed(transition: Transition, event: CheckpointCommitted) -> None:
    if event.by_generation > transition.state.generation:
        end_found_generation(transition, event.by_generation, "storage has a checkpoint of")
    if not transition.trouble.counts(event.by_generation, event.step):
        transition.say(f"checkpoint {event.checkpoint} is ignored: it was made after an anomaly", "anomaly")
        return
    known = KnownCheckpoint(event.checkpoint, event.step)
    if known not in transition.saved.checkpoints:
        # Retention keeps fewer than these; a list that grew for months would slow every transition.
        transition.set_saved(checkpoints=(known, *transition.saved.checkpoints[: _KEPT - 1]))
    transition.set(furthest_step=max(transition.state.furthest_step, event.step))
    if transition.saved.storage_failing:
        transition.say(f"storage accepts checkpoints again: {event.checkpoint}", kind="storage")
    transition.set_saved(storage_failing=False, cannot_save=())
