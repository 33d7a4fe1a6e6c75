"""Slots and workers: how they come, how they are lost, and what their loss means for the generation they are in."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.actions import Probe
from elastic.core.events import (
    ProbeAnswered,
    SlotLost,
    SlotPlaced,
    WorkerDied,
    WorkerReady,
    WorkersSilent,
    WorkerStartFailed,
)
from elastic.core.policy.quarantine import avoided
from elastic.core.run.recovery import backdate, fail_generation, finish, hold_back_slots, record_loss, survey_memory
from elastic.core.run.state import (
    GAVE_UP,
    USAGE,
    Closing,
    Ending,
    Joining,
    Pausing,
    RunState,
    SlotPhase,
    Suspicion,
    Training,
    Waiting,
    Worker,
    WorkerPhase,
)
from elastic.core.run.transition import Turn


def slot_placed(turn: Turn, event: SlotPlaced) -> None:
    slot = turn.state.slots.get(event.slot)
    if slot is None or slot.phase is SlotPhase.PLACED:
        return
    if event.node in avoided(turn.state.quarantine, turn.now):
        turn.drop_slot(slot.id, f"node {event.node[:8]} is to be left alone")
        return
    if event.node in turn.state.draining:
        turn.drop_slot(slot.id, f"node {event.node[:8]} is going away")
        hold_back_slots(turn)
        return
    turn.put_slot(replace(slot, phase=SlotPhase.PLACED, node=event.node, since=turn.now))
    turn.say(f"slot {slot.id} got node {event.node[:8]} after {turn.now - slot.since:.1f} s")
    for _ in range(turn.state.settings.scaling.workers_per_slot):
        turn.start_worker(slot.id)


def slot_lost(turn: Turn, event: SlotLost) -> None:
    lose_slot(turn, event.slot, event.evidence, "node-lost")


def needed(state: RunState, worker: Worker) -> bool:
    """True when the generation cannot do without this worker.

    At a planned end and after the last step that holds for members that are done, too: until the checkpoint is
    complete, a part of it may be in their hands only.
    """
    stage = state.stage
    if isinstance(stage, Pausing | Closing):
        return worker.id in state.members
    return isinstance(stage, Joining | Training | Ending) and worker.phase is WorkerPhase.MEMBER


def lose_slot(turn: Turn, slot_id: int, evidence: str, kind: str) -> None:
    """Drop the slot; when the generation needs one of its workers, the generation ends."""
    slot = turn.state.slots.get(slot_id)
    if slot is None:
        return
    if slot.node is not None:
        turn.strike(slot.node, "it was lost again", certain=False)
    members = tuple(worker.id for worker in turn.workers_in(slot_id) if needed(turn.state, worker))
    if members:
        ranks = ", ".join(str(turn.state.rank_of(w)) for w in members)
        evidence = f"{evidence} (rank {ranks})"
        turn.drop_slot(slot_id, evidence)
        fail_generation(turn, kind, evidence, lost=members, node=slot.node)
        return
    if slot.phase is SlotPhase.PLACED and isinstance(turn.state.stage, Waiting):
        # Between two generations nobody is a member, but what is being recovered from has become worse.
        record_loss(turn, tuple(worker.id for worker in turn.workers_in(slot_id)), slot.node)
    turn.drop_slot(slot_id, evidence)
    turn.say(f"slot {slot_id} is lost: {evidence}")
    if slot.phase is SlotPhase.PLACED and isinstance(turn.state.stage, Waiting | Pausing) and turn.state.surveys:
        # Its node's memory went with it, which the last survey may have counted on.
        survey_memory(turn)
    if slot.phase is SlotPhase.PENDING:
        hold_back_slots(turn)


def worker_ready(turn: Turn, event: WorkerReady) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    turn.put_worker(replace(worker, phase=WorkerPhase.IDLE, pid=event.pid, host=event.host, since=turn.now))
    slot = turn.state.slots[worker.slot]
    turn.put_slot(replace(slot, start_failures=0))
    turn.set(streaks=replace(turn.state.streaks, start_failures=0, slot_failures=0))
    turn.say(f"{turn.name_of(worker.id)} is ready after {turn.now - worker.since:.1f} s", kind="worker")
    for _ in range(turn.state.settings.scaling.workers_per_slot - len(turn.workers_in(slot.id))):
        # A neighbour was given up here; the slot has just shown that it is not the slot.
        turn.start_worker(slot.id)


def worker_start_failed(turn: Turn, event: WorkerStartFailed) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    if event.usage:
        finish(turn, USAGE, event.evidence)
    else:
        start_failed(turn, worker.id, event.evidence)


def start_failed(turn: Turn, worker_id: int, evidence: str) -> None:
    """Try again in the slot, then in another slot, then give up; never while a generation is at work without it."""
    worker = turn.state.workers[worker_id]
    slot = turn.state.slots[worker.slot]
    scaling, limits = turn.state.settings.scaling, turn.state.settings.failures
    streak = turn.state.streaks.start_failures + 1
    turn.set(streaks=replace(turn.state.streaks, start_failures=streak))
    turn.put_slot(replace(slot, start_failures=slot.start_failures + 1))
    turn.say(f"{turn.name_of(worker_id)} could not be started: {evidence}")
    stuck = isinstance(turn.state.stage, Waiting) and len(turn.idle_workers()) < scaling.min_workers
    if stuck and streak > limits.startup_retries * (scaling.max_slots + 1):
        finish(turn, GAVE_UP, f"{streak} worker processes in a row could not be started; the last: {evidence}")
    elif slot.start_failures < limits.startup_retries:
        turn.replace_worker(worker_id, evidence)
    else:
        turn.kill_worker(worker_id, evidence)


def drop_worn_slots(turn: Turn) -> None:
    """Give back slots in which workers cannot be started, once the generation does not need their other workers."""
    retries = turn.state.settings.failures.startup_retries
    for slot in tuple(turn.state.slots.values()):
        if slot.start_failures > retries and not any(needed(turn.state, w) for w in turn.workers_in(slot.id)):
            if slot.node is not None:
                turn.strike(slot.node, "workers cannot be started there", certain=True)
            turn.drop_slot(slot.id, f"{slot.start_failures} failed starts in a row")
            hold_back_slots(turn)


def worker_died(turn: Turn, event: WorkerDied) -> None:
    lose_worker(turn, event.worker, event.evidence, "worker-lost")


def lose_worker(turn: Turn, worker_id: int, evidence: str, kind: str) -> None:
    """Replace the process; when the generation needs it, the generation ends."""
    worker = turn.state.workers.get(worker_id)
    if worker is None:
        return
    stage = turn.state.stage
    if worker.phase is WorkerPhase.STARTING:
        start_failed(turn, worker_id, evidence)
    elif needed(turn.state, worker):
        evidence = f"{turn.name_of(worker_id)}: {evidence}"
        # A process that ends after its training function raised is no loss of its own: the exception is the cause.
        raised = isinstance(stage, Ending) and worker_id in stage.raised
        # Written off before the generation is ended, so that nobody waits for it to leave.
        turn.replace_worker(worker_id, evidence)
        fail_generation(turn, "user-error" if raised else kind, evidence, lost=(worker_id,))
    else:
        turn.say(f"{turn.name_of(worker_id)} is lost while idle: {evidence}")
        turn.replace_worker(worker_id, evidence)


def workers_silent(turn: Turn, event: WorkersSilent) -> None:
    """Silence is suspicion, not proof: probe. A generation that has failed already needs no second proof."""
    known = [turn.state.workers[w] for w in event.workers if w in turn.state.workers]
    silent = frozenset(w.id for w in known if w.phase is not WorkerPhase.STARTING)
    if not silent:
        return
    state, old = turn.state, turn.state.suspicion
    deadline = turn.now + state.settings.failures.probe_timeout_s
    before = old.suspects if old else {}
    fresh = sorted(silent - before.keys())
    suspicion = Suspicion(
        since=old.since if old else turn.now,
        suspects={**before, **dict.fromkeys(fresh, deadline)},
        nodes=frozenset(event.nodes) | (old.nodes if old else frozenset()),
        silence_s=max(event.silence_s, old.silence_s if old else 0.0),
    )
    turn.set(suspicion=suspicion)
    if isinstance(state.stage, Ending):
        condemn(turn, silent)
    elif fresh:
        turn.do(Probe(tuple(fresh)))


def probe_answered(turn: Turn, event: ProbeAnswered) -> None:
    old = turn.state.suspicion
    if old is None or event.worker not in old.suspects:
        return
    node = turn.state.node_of(event.worker)
    suspects = {worker: deadline for worker, deadline in old.suspects.items() if worker != event.worker}
    # One process that answers acquits its whole node of being dead.
    rest = replace(old, suspects=suspects, nodes=old.nodes - {node} if node else old.nodes)
    turn.set(suspicion=rest if suspects else None)
    if not suspects:
        turn.set(false_alarms=turn.state.false_alarms + 1)
        turn.say(f"false alarm: every silent worker answered within {turn.now - old.since:.1f} s", kind="false-alarm")


def condemn(turn: Turn, guilty: frozenset[int]) -> None:
    """These suspects did not answer: write off their nodes, or the single processes."""
    suspicion = turn.state.suspicion
    if suspicion is None:
        return
    rest = {worker: deadline for worker, deadline in suspicion.suspects.items() if worker not in guilty}
    turn.set(suspicion=replace(suspicion, suspects=rest) if rest else None)
    silence = suspicion.silence_s + (turn.now - suspicion.since)
    # Peers that lost their connections first tell a node that is gone from one that only stands still.
    kind = "node-lost" if isinstance(turn.state.stage, Ending) else "node-frozen"
    for slot in tuple(turn.state.slots.values()):
        if slot.node in suspicion.nodes and any(w.id in guilty for w in turn.workers_in(slot.id)):
            lose_slot(turn, slot.id, f"node {slot.node[:8]} has been silent for {silence:.1f} s", kind)
    for worker in sorted(guilty & turn.state.workers.keys()):
        lose_worker(turn, worker, f"silent for {silence:.1f} s while its node is alive", "worker-frozen")
    backdate(turn, silence)
