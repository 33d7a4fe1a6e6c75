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
from elastic.core.recovery import fail_generation, finish, in_generation, open_incident, record_loss
from elastic.core.state import GAVE_UP, USAGE, Ending, SlotPhase, Suspicion, WorkerPhase
from elastic.core.turn import Turn


def slot_placed(turn: Turn, event: SlotPlaced) -> None:
    slot = turn.state.slots.get(event.slot)
    if slot is None or slot.phase is SlotPhase.PLACED:
        return
    turn.put_slot(replace(slot, phase=SlotPhase.PLACED, node=event.node, since=turn.now))
    turn.say(f"slot {slot.id} got node {event.node[:8]} after {turn.now - slot.since:.1f} s")
    for _ in range(turn.state.settings.scaling.workers_per_slot):
        turn.start_worker(slot.id)


def slot_lost(turn: Turn, event: SlotLost) -> None:
    lose_slot(turn, event.slot, event.evidence, "node-lost")


def lose_slot(turn: Turn, slot_id: int, evidence: str, kind: str) -> None:
    """Drop the slot; when one of its workers was inside the generation, the generation ends."""
    slot = turn.state.slots.get(slot_id)
    if slot is None:
        return
    workers = turn.workers_in(slot_id)
    members = tuple(w.id for w in workers if w.phase is WorkerPhase.MEMBER)
    if members and in_generation(turn.state):
        ranks = ", ".join(str(turn.state.rank_of(w)) for w in members)
        evidence = f"{evidence} (rank {ranks})"
        if isinstance(turn.state.stage, Ending):
            open_incident(turn, kind, evidence, turn.state.furthest_step)
        record_loss(turn, members, slot.node)
        turn.drop_slot(slot_id, evidence)
        fail_generation(turn, kind, evidence)
        record_loss(turn, members, slot.node)
    else:
        turn.drop_slot(slot_id, evidence)
        turn.say(f"slot {slot_id} is lost: {evidence}")


def worker_ready(turn: Turn, event: WorkerReady) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    turn.put_worker(replace(worker, phase=WorkerPhase.IDLE, pid=event.pid, host=event.host, since=turn.now))
    slot = turn.state.slots[worker.slot]
    turn.put_slot(replace(slot, start_failures=0))
    turn.set(streaks=replace(turn.state.streaks, start_failures=0))
    turn.say(f"{turn.name_of(worker.id)} is ready after {turn.now - worker.since:.1f} s", kind="worker")


def worker_start_failed(turn: Turn, event: WorkerStartFailed) -> None:
    worker = turn.state.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    if event.usage:
        finish(turn, USAGE, event.evidence)
    else:
        start_failed(turn, worker.id, event.evidence)


def start_failed(turn: Turn, worker_id: int, evidence: str) -> None:
    """Try again in the slot, then in another slot, then give up."""
    worker = turn.state.workers[worker_id]
    slot = turn.state.slots[worker.slot]
    limits = turn.state.settings.failures
    streak = turn.state.streaks.start_failures + 1
    turn.set(streaks=replace(turn.state.streaks, start_failures=streak))
    turn.say(f"{turn.name_of(worker_id)} could not be started: {evidence}")
    if streak > limits.startup_retries * (turn.state.settings.scaling.max_slots + 1):
        finish(turn, GAVE_UP, f"{streak} worker processes in a row could not be started; the last: {evidence}")
    elif slot.start_failures >= limits.startup_retries:
        turn.drop_slot(slot.id, f"{slot.start_failures + 1} failed starts in a row")
    else:
        turn.put_slot(replace(slot, start_failures=slot.start_failures + 1))
        turn.replace_worker(worker_id, evidence)


def worker_died(turn: Turn, event: WorkerDied) -> None:
    lose_worker(turn, event.worker, event.evidence, "worker-lost")


def lose_worker(turn: Turn, worker_id: int, evidence: str, kind: str) -> None:
    """Replace the process; when it was inside the generation, the generation ends."""
    worker = turn.state.workers.get(worker_id)
    if worker is None:
        return
    if worker.phase is WorkerPhase.STARTING:
        start_failed(turn, worker_id, evidence)
    elif worker.phase is WorkerPhase.MEMBER and in_generation(turn.state):
        evidence = f"{turn.name_of(worker_id)}: {evidence}"
        if isinstance(turn.state.stage, Ending):
            open_incident(turn, kind, evidence, turn.state.furthest_step)
        # Written off before the generation is ended, so that nobody waits for it to leave.
        turn.replace_worker(worker_id, evidence)
        fail_generation(turn, kind, evidence)
        record_loss(turn, (worker_id,))
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
    fresh = silent - (old.suspects if old else frozenset())
    suspicion = Suspicion(
        since=old.since if old else turn.now,
        deadline=(deadline if fresh else old.deadline) if old else deadline,
        suspects=silent | (old.suspects if old else frozenset()),
        nodes=frozenset(event.nodes) | (old.nodes if old else frozenset()),
        silence_s=max(event.silence_s, old.silence_s if old else 0.0),
    )
    turn.set(suspicion=suspicion)
    if isinstance(state.stage, Ending):
        condemn(turn)
    elif fresh:
        turn.do(Probe(tuple(sorted(fresh))))


def probe_answered(turn: Turn, event: ProbeAnswered) -> None:
    old = turn.state.suspicion
    if old is None or event.worker not in old.suspects:
        return
    node = turn.state.node_of(event.worker)
    suspects = old.suspects - {event.worker}
    # One process that answers acquits its whole node of being dead.
    rest = replace(old, suspects=suspects, nodes=old.nodes - {node} if node else old.nodes)
    turn.set(suspicion=rest if suspects else None)
    if not suspects:
        turn.set(false_alarms=turn.state.false_alarms + 1)
        turn.say(f"false alarm: every silent worker answered within {turn.now - old.since:.1f} s", kind="false-alarm")


def condemn(turn: Turn) -> None:
    """The suspects did not answer: write off their nodes, or the single processes."""
    suspicion = turn.state.suspicion
    if suspicion is None:
        return
    turn.set(suspicion=None)
    silence = suspicion.silence_s + (turn.now - suspicion.since)
    for slot in tuple(turn.state.slots.values()):
        if slot.node in suspicion.nodes and any(w.id in suspicion.suspects for w in turn.workers_in(slot.id)):
            lose_slot(turn, slot.id, f"node {slot.node[:8]} has been silent for {silence:.1f} s", "node-frozen")
    for worker in sorted(suspicion.suspects & turn.state.workers.keys()):
        lose_worker(turn, worker, f"silent for {silence:.1f} s while its node is alive", "worker-frozen")
