"""Slots and workers: arrival and loss, the effect of a loss on the generation, and who is in the next one, on which
mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from elastic.core.actions import MeasureNode, Probe
from elastic.core.checkpoint.snapshots import Copies, is_snapshot, parse_snapshot_id
from elastic.core.events import (
    ProbeAnswered,
    SlotLost,
    SlotPlaced,
    WorkerDied,
    WorkerReady,
    WorkerSettingUp,
    WorkersSilent,
    WorkerStartFailed,
)
from elastic.core.mesh import Mesh, MeshSettings, whole_cells
from elastic.core.policy.quarantine import avoided
from elastic.core.run.budgets import hold_back_slots
from elastic.core.run.phase import GAVE_UP, USAGE, Closing, Ending, Joining, Pausing, Training, Waiting
from elastic.core.run.recovery import backdate, fail_generation, finish, query_snapshots, record_loss
from elastic.core.run.state import KnownCheckpoint, RunState, SlotPhase, Suspicion, Worker, WorkerPhase
from elastic.core.run.transition import Transition
from elastic.core.sharding.mesh_policy import MeshFacts, MeshVerdict, choose, outlook
from elastic.core.sharding.placement import members_in_order

# Idle nodes that are named to a newcomer, in case that one does not answer.
_PARTNERS = 2


def slot_placed(transition: Transition, event: SlotPlaced) -> None:
    slot = transition.fleet.slots.get(event.slot)
    if slot is None or slot.phase is SlotPhase.PLACED:
        return
    if event.node in avoided(transition.fleet.quarantine, transition.now):
        transition.drop_slot(slot.id, f"node {event.node[:8]} is quarantined")
        return
    if event.node in transition.fleet.draining:
        transition.drop_slot(slot.id, f"node {event.node[:8]} is draining")
        hold_back_slots(transition)
        return
    transition.put_slot(replace(slot, phase=SlotPhase.PLACED, node=event.node, since=transition.now))
    transition.set(meter=transition.state.meter.placed(slot.id))
    transition.say(f"slot {slot.id} got node {event.node[:8]} after {transition.now - slot.since:.1f} s")
    _measure(transition, event.node)
    transition.start_workers(slot.id, transition.state.settings.scaling.workers_per_slot)


def _measure(transition: Transition, node: str) -> None:
    """Together with an idle node: never with one that trains. A node with an older slot was measured for that."""
    state = transition.state
    if state.settings.calibration.policy == "off" or len(state.fleet.slots.on(node)) > 1:
        return
    training = {state.fleet.node_of(member) for member in state.members}
    idle = [other for other in reversed(state.fleet.nodes) if other != node and other not in training]
    transition.do(MeasureNode(node, tuple(idle[:_PARTNERS])))


def slot_lost(transition: Transition, event: SlotLost) -> None:
    lose_slot(transition, event.slot, event.evidence, "node-lost")


def needed(state: RunState, worker: Worker) -> bool:
    """True when the generation cannot continue without this worker.

    At a planned end and after the last step that includes members that are done: until the checkpoint is complete, a
    part of it may exist in their memory only.
    """
    phase = state.phase
    if isinstance(phase, Pausing | Closing):
        return worker.id in state.members
    return isinstance(phase, Joining | Training | Ending) and state.is_inside(worker.id)


def lose_slot(transition: Transition, slot_id: int, evidence: str, kind: str) -> None:
    """Drop the slot; when the generation needs one of its workers, the generation ends."""
    slot = transition.fleet.slots.get(slot_id)
    if slot is None:
        return
    if slot.node is not None:
        transition.strike(slot.node, "it was lost again", certain=False)
        if slot.node not in transition.fleet.draining:
            transition.set(meter=transition.state.meter.lost(transition.now))
    members = tuple(worker.id for worker in transition.workers_in(slot_id) if needed(transition.state, worker))
    if members:
        ranks = ", ".join(str(transition.state.rank_of(w)) for w in members)
        evidence = f"{evidence} (rank {ranks})"
        transition.drop_slot(slot_id, evidence)
        fail_generation(transition, kind, evidence, lost=members, node=slot.node)
        return
    if slot.phase is SlotPhase.PLACED and isinstance(transition.state.phase, Waiting):
        # Between two generations there are no members, but the loss belongs to the incident.
        record_loss(transition, tuple(worker.id for worker in transition.workers_in(slot_id)), slot.node)
    transition.drop_slot(slot_id, evidence)
    transition.say(f"slot {slot_id} is lost: {evidence}")
    if (
        slot.phase is SlotPhase.PLACED
        and isinstance(transition.state.phase, Waiting | Pausing)
        and transition.saved.surveys
    ):
        # Its node's snapshots are gone, and the last survey may have counted them.
        query_snapshots(transition)
    if slot.phase is SlotPhase.PENDING:
        hold_back_slots(transition)


def worker_setting_up(transition: Transition, event: WorkerSettingUp) -> None:
    worker = transition.fleet.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    lasted = worker.before_s + transition.now - worker.since
    transition.put_worker(replace(worker, since=transition.now, before_s=lasted))
    transition.say(
        f"{transition.name_of(worker.id)} is in its set-up, {lasted:.0f} s after its start, and makes progress: the "
        "others train meanwhile",
        kind="worker",
    )


def worker_ready(transition: Transition, event: WorkerReady) -> None:
    worker = transition.fleet.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    transition.put_worker(
        replace(
            worker,
            phase=WorkerPhase.READY,
            pid=event.pid,
            host=event.host,
            since=transition.now,
            before_s=0.0,
            lasting=event.lasting,
        )
    )
    slot = transition.fleet.slots[worker.slot]
    if slot.start_failures:
        transition.put_slot(replace(slot, start_failures=0))
    streaks = transition.trouble.streaks
    if streaks.start_failures or streaks.slot_failures:
        transition.set_trouble(streaks=replace(streaks, start_failures=0, slot_failures=0))
    transition.say(
        f"{transition.name_of(worker.id)} is ready after {worker.before_s + transition.now - worker.since:.1f} s",
        kind="worker",
    )
    if all(other.phase is not WorkerPhase.STARTING for other in transition.workers_in(slot.id)):
        transition.set(meter=transition.state.meter.ready(slot.id, transition.now))
    # Another worker may have been given up in this slot. The slot can start workers, as this one shows, so try again.
    missing = transition.state.settings.scaling.workers_per_slot - len(transition.workers_in(slot.id))
    transition.start_workers(slot.id, missing)


def worker_start_failed(transition: Transition, event: WorkerStartFailed) -> None:
    worker = transition.fleet.workers.get(event.worker)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return
    if event.usage:
        finish(transition, USAGE, event.evidence)
    else:
        start_failed(transition, worker.id, event.evidence)


def start_failed(transition: Transition, worker_id: int, evidence: str) -> None:
    """Retry in the slot, then in another slot, then give up; never give up while a generation runs without it."""
    worker = transition.fleet.workers[worker_id]
    slot = transition.fleet.slots[worker.slot]
    scaling, limits = transition.state.settings.scaling, transition.state.settings.failures
    streak = transition.trouble.streaks.start_failures + 1
    transition.set_trouble(streaks=replace(transition.trouble.streaks, start_failures=streak))
    transition.put_slot(replace(slot, start_failures=slot.start_failures + 1))
    transition.say(f"{transition.name_of(worker_id)} could not be started: {evidence}")
    stuck = isinstance(transition.state.phase, Waiting) and transition.state.idle_count < scaling.min_workers
    if stuck and streak > limits.startup_retries * (scaling.max_slots + 1):
        finish(transition, GAVE_UP, f"{streak} worker processes in a row could not be started; the last: {evidence}")
    elif slot.start_failures < limits.startup_retries:
        transition.replace_worker(worker_id, evidence)
    else:
        transition.kill_worker(worker_id, evidence)


def drop_worn_slots(transition: Transition) -> None:
    """Release slots in which workers cannot be started, once the generation does not need their other workers."""
    retries = transition.state.settings.failures.startup_retries
    for slot in [transition.fleet.slots[number] for number in sorted(transition.fleet.slots.failing)]:
        if slot.start_failures > retries and not any(
            needed(transition.state, w) for w in transition.workers_in(slot.id)
        ):
            if slot.node is not None:
                transition.strike(slot.node, "workers cannot be started there", certain=True)
            transition.drop_slot(slot.id, f"{slot.start_failures} failed starts in a row")
            hold_back_slots(transition)


def worker_died(transition: Transition, event: WorkerDied) -> None:
    lose_worker(transition, event.worker, event.evidence, "worker-lost")


def lose_worker(transition: Transition, worker_id: int, evidence: str, kind: str) -> None:
    """Replace the process; when the generation needs it, the generation ends."""
    worker = transition.fleet.workers.get(worker_id)
    if worker is None:
        return
    phase = transition.state.phase
    if worker.phase is WorkerPhase.STARTING:
        start_failed(transition, worker_id, evidence)
    elif needed(transition.state, worker):
        evidence = f"{transition.name_of(worker_id)}: {evidence}"
        # If the training function raised before the process ended, the exception is the cause.
        raised = isinstance(phase, Ending) and worker_id in phase.raised
        # Remove it before the generation ends, so that the end does not wait for it to leave.
        transition.replace_worker(worker_id, evidence)
        fail_generation(transition, "user-error" if raised else kind, evidence, lost=(worker_id,))
    else:
        transition.say(f"{transition.name_of(worker_id)} is lost while idle: {evidence}")
        transition.replace_worker(worker_id, evidence)


def workers_silent(transition: Transition, event: WorkersSilent) -> None:
    """Silence is only suspicion: probe. A generation that has failed already needs no further evidence."""
    known = [transition.fleet.workers[w] for w in event.workers if w in transition.fleet.workers]
    silent = frozenset(w.id for w in known if w.phase is not WorkerPhase.STARTING)
    if not silent:
        return
    state, old = transition.state, transition.trouble.suspicion
    deadline = transition.now + state.settings.failures.probe_timeout_s
    before = old.suspects if old else {}
    fresh = sorted(silent - before.keys())
    suspicion = Suspicion(
        since=old.since if old else transition.now,
        suspects={**before, **dict.fromkeys(fresh, deadline)},
        nodes=frozenset(event.nodes) | (old.nodes if old else frozenset()),
        silence_s=max(event.silence_s, old.silence_s if old else 0.0),
    )
    transition.set_trouble(suspicion=suspicion)
    if isinstance(state.phase, Ending):
        condemn(transition, silent)
    elif fresh:
        transition.do(Probe(tuple(fresh)))


def probe_answered(transition: Transition, event: ProbeAnswered) -> None:
    old = transition.trouble.suspicion
    if old is None or event.worker not in old.suspects:
        return
    node = transition.fleet.node_of(event.worker)
    suspects = {worker: deadline for worker, deadline in old.suspects.items() if worker != event.worker}
    # One answering process shows that its whole node is alive.
    rest = replace(old, suspects=suspects, nodes=old.nodes - {node} if node else old.nodes)
    transition.set_trouble(suspicion=rest if suspects else None)
    if node is not None and node in old.nodes and _acquitted_too_often(transition, node):
        return
    if not suspects:
        transition.set_trouble(false_alarms=transition.trouble.false_alarms + 1)
        transition.say(
            f"false alarm: every silent worker answered within {transition.now - old.since:.1f} s", kind="false-alarm"
        )


def _acquitted_too_often(transition: Transition, node: str) -> bool:
    """Count one more acquittal of a node whose agent is silent; True when the node is given up because of it.

    Without its agent a node takes no snapshots, and neither reports nor kills processes. Answers of its workers must
    not keep the run in that state indefinitely.
    """
    limits = transition.state.settings.failures
    # Longer than one silence and its probe: the agent was heard in between.
    window_s = 3 * (limits.suspect_after_s + limits.probe_timeout_s)
    slots = [transition.fleet.slots[slot] for slot in transition.fleet.slots.on(node)]
    for slot in slots:
        again = transition.now - slot.acquitted_at <= window_s
        count = slot.acquittals + 1 if again else 1
        transition.put_slot(replace(slot, acquittals=count, acquitted_at=transition.now))
    count = max(transition.fleet.slots[slot.id].acquittals for slot in slots)
    if count < limits.silent_agent_limit:
        return False
    evidence = f"the agent of node {node[:8]} was silent {count} times in a row, although its workers answer"
    for slot in slots:
        lose_slot(transition, slot.id, evidence, "node-frozen")
    return True


def condemn(transition: Transition, guilty: frozenset[int]) -> None:
    """These suspects did not answer: treat their nodes, or the single processes, as lost."""
    suspicion = transition.trouble.suspicion
    if suspicion is None:
        return
    rest = {worker: deadline for worker, deadline in suspicion.suspects.items() if worker not in guilty}
    transition.set_trouble(suspicion=replace(suspicion, suspects=rest) if rest else None)
    silence = suspicion.silence_s + (transition.now - suspicion.since)
    # If peers have lost their connections before, the node is gone and not merely frozen.
    kind = "node-lost" if isinstance(transition.state.phase, Ending) else "node-frozen"
    for slot in tuple(transition.fleet.slots.values()):
        if slot.node in suspicion.nodes and any(w.id in guilty for w in transition.workers_in(slot.id)):
            lose_slot(transition, slot.id, f"node {slot.node[:8]} has been silent for {silence:.1f} s", kind)
    for worker in sorted(guilty & transition.fleet.workers.keys()):
        lose_worker(transition, worker, f"silent for {silence:.1f} s while its node is alive", "worker-frozen")
    backdate(transition, silence)


def next_mesh(transition: Transition, size: int, base: KnownCheckpoint | None) -> MeshVerdict:
    """The mesh of a generation that begins now on `size` workers at most."""
    return choose(_mesh_facts(transition, size, base))


def _mesh_facts(transition: Transition, size: int, base: KnownCheckpoint | None) -> MeshFacts:
    state = transition.state
    settings, copies = state.settings, state.saved.copies if base is not None and is_snapshot(base.id) else Copies()
    before = _mesh_of(transition, base, copies) if state.axes else None
    passes = None
    if settings.global_batch is not None and settings.micro_batch is not None:
        passes = -(-settings.global_batch // settings.micro_batch)

    def nodes_of(world_size: int, mesh: MeshSettings) -> list[str | None]:
        return [state.fleet.node_of(worker) for worker in ranked(transition, world_size, base, mesh)]

    return MeshFacts(
        settings.mesh, size, settings.scaling.min_workers, passes, state.meter.measured.meshes,
        state.axes or None, before, copies, nodes_of, state.meter.measured.memory,
        state.meter.measured.refused_tp,
    )  # fmt: skip


def _mesh_of(transition: Transition, base: KnownCheckpoint | None, copies: Copies) -> Mesh | None:
    """That of the ranks that have taken a snapshot; None where it is not known."""
    state, mesh = transition.state, transition.state.settings.mesh
    if base is None or not copies.ranks or copies.ranks % mesh.shape(state.axes).cell:
        return None
    # Where it may change, of the last generation's snapshots alone.
    last = is_snapshot(base.id) and parse_snapshot_id(base.id)[1] == state.generation
    return mesh.shape(state.axes).mesh(copies.ranks) if last or not mesh.choices else None


def ranked(transition: Transition, size: int, base: KnownCheckpoint | None, mesh: MeshSettings) -> tuple[int, ...]:
    """The members of a generation with this mesh by rank: one slot's are neighbours, and each slot gets the ranks whose
    state its node holds.

    Rank 0 begins on a node that is likely to last, and stays there: where it is lost another function becomes rank 0,
    and many are called again for it.
    """
    slots = [(slot.node, workers) for slot, workers in transition.state.idle_slots]
    if not transition.state.members:
        known = transition.fleet.workers
        slots.sort(key=lambda slot: -max(known[worker].lasting for worker in slot[1]))
    in_memory = base is not None and is_snapshot(base.id)
    copies = transition.saved.copies if in_memory else Copies()
    leader = next(iter(transition.state.members), None)
    after = mesh.mesh(size) if size % mesh.cell == 0 else None
    return members_in_order(slots, size, copies, mesh.cell, leader, _mesh_of(transition, base, copies), after)


def say_outlook(transition: Transition) -> None:
    """Which mesh would follow the loss of the node, or the two, with most members: known before it happens."""
    state = transition.state
    on_nodes = Counter(state.fleet.node_of(worker) for worker in state.members).most_common(3)
    if not state.axes or len(on_nodes) < 2:
        return
    left, workers = [], state.world_size + state.idle_count
    for _, lost in on_nodes[: min(2, len(on_nodes) - 1)]:
        workers -= lost
        left.append(workers)
    transition.say(outlook(_mesh_facts(transition, workers, None), left), kind="outlook")


def expected_place(state: RunState, worker: int) -> tuple[int, int] | None:
    """(rank, world size) of `worker` in the next generation, if all who have come join in it; of one that stands by,
    if it takes the place of one that is lost.

    None where it is not to be told: nobody trains, it is a member, or too many for whole cells. The rank is not 0,
    which stays with the worker that has it as long as that is there; it may become another one, as ranks go where their
    state is.
    """
    members, mesh = state.members, state.settings.mesh
    if not isinstance(state.phase, Training) or worker in members or worker not in state.fleet.workers:
        return None
    others = sorted(other for other in state.fleet.workers if other not in members)
    size = whole_cells(min(len(members) + len(others), state.settings.scaling.max_workers), *mesh.cells)
    if mesh.cells == (1,):
        return (min(len(members) + others.index(worker), size - 1), size) if size > 1 else None
    # Where cells have ranks of several slots, these follow the slots, and a place is more than a number.
    slots = [slot for slot in state.fleet.slots if slot not in state.fleet.evicted]
    in_slots = [each for slot in slots for each in state.fleet.workers.numbers_in(slot)]
    rank = in_slots.index(worker) if worker in in_slots else 0
    return (rank, size) if 0 < rank < size else None
