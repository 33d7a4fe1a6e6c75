"""Handling of stragglers, of slow nodes and of failing devices: each is reported, and if the policy says so, its slot
is released.

An eviction is a planned end like growth: all members stop after the same step and the others continue from it. The slot
is kept until they train, since the last step may exist in its node's memory only.
"""

from __future__ import annotations

from elastic.core.events import CollectivesSlowed, DeviceFailed, NodeMeasured, StragglerFound
from elastic.core.policy.calibration import Calibration, described, judge, remembered
from elastic.core.run.generations import start_pause
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.state import RunState, WorkerPhase
from elastic.core.run.transition import Transition


def straggler_found(transition: Transition, event: StragglerFound) -> None:
    state = transition.state
    if event.worker not in state.members or event.worker not in state.fleet.workers:
        return  # It has been given up in the meantime.
    settings, name = state.settings.stragglers, transition.name_of(event.worker)
    windows = f"{event.windows} windows of {settings.window_steps} steps running"
    told = (
        f"{name} needs {event.factor:.2f} times as long as its peers for its own part of a step "
        f"({event.own_s:.4g} s, they {event.peers_s:.4g} s), {windows}"
    )
    told += f"; its device is slowed by {event.slowed}" if event.slowed else ""
    transition.say(
        told, kind="straggler", worker=event.worker, node=state.fleet.node_of(event.worker), factor=event.factor
    )
    if settings.policy == "evict" and event.confirmed:
        _evict(transition, event.worker, told)


def collectives_slowed(transition: Transition, event: CollectivesSlowed) -> None:
    """No rank can be named, so nothing is released."""
    settings = transition.state.settings.stragglers
    transition.say(
        f"collectives take {event.factor:.2f} times as long as when generation {event.generation} began "
        f"({event.now_s:.4g} s of a step, {event.usual_s:.4g} s then), {event.windows} windows of "
        f"{settings.window_steps} steps running, without the waits for ranks that compute longer: a connection has "
        "become slower",
        kind="straggler", factor=event.factor,
    )  # fmt: skip


def device_failed(transition: Transition, event: DeviceFailed) -> None:
    """A device that is unfit is left while it still answers; one that breaks a generation is not in the next."""
    state = transition.state
    worker = state.fleet.workers.get(event.worker)
    if worker is None:
        return
    told = f"GPU {event.gpu} of {transition.name_of(worker.id)}: {event.evidence}"
    transition.say(
        told, kind="device", worker=worker.id, node=state.fleet.node_of(worker.id), gpu=event.gpu, unfit=event.unfit
    )
    if not event.unfit or state.settings.device_faults != "evict" or worker.slot in state.fleet.evicted:
        return
    gone = (worker.slot, *state.fleet.evicted)
    left = sum(
        other.slot not in gone and other.phase is not WorkerPhase.STARTING for other in state.fleet.workers.values()
    )
    low = state.settings.scaling.min_workers
    if left < low:
        transition.say(f"{transition.name_of(worker.id)} is kept: {left} would be left of at least {low}")
        return
    transition.set_fleet(evicted=(*state.fleet.evicted, worker.slot))


def node_measured(transition: Transition, event: NodeMeasured) -> None:
    """The node is compared with the others, and left where it is refused and enough others remain."""
    state, node = transition.state, event.node
    if node not in state.fleet.nodes:
        return
    if event.failed:
        transition.say(f"node {node[:8]} could not be measured: {event.failed}", kind="calibration", node=node)
        return
    own = Calibration(node, event.rates, event.partner, event.link, event.sent, event.received)
    verdict = judge(own, [one for one in state.fleet.calibrations if one.node != node], state.settings.calibration)
    why = "; ".join(verdict.reasons)
    transition.say(
        f"node {node[:8]} is {verdict.state}{f': {why}' if why else ''} ({described(own)})",
        kind="calibration", node=node, state=verdict.state, reasons=list(verdict.reasons),
    )  # fmt: skip
    if verdict.state == "refused" and state.settings.calibration.policy == "refuse" and _leaves(transition, node, why):
        return
    transition.set_fleet(calibrations=remembered(state.fleet.calibrations, own))


def _leaves(transition: Transition, node: str, why: str) -> bool:
    """Leave a node whose workers have not begun; False where the run needs it."""
    state = transition.state
    slots = state.fleet.slots.on(node)
    others = [worker for worker in state.fleet.workers.values() if worker.slot not in slots]
    low = state.settings.scaling.min_workers
    if len(others) < low or state.carrying & frozenset(slots):
        transition.say(f"node {node[:8]} is kept: {len(others)} workers are on others, at least {low} are needed")
        return False
    transition.strike(node, why, certain=True)
    for slot in slots:
        transition.drop_slot(slot, f"its node is too slow: {why}")
    return True


def _evict(transition: Transition, worker: int, why: str) -> None:
    state = transition.state
    phase, slot = state.phase, state.fleet.workers[worker].slot
    if not isinstance(phase, Training) or phase.completed or not phase.first_step_done or state.stop_reason is not None:
        return
    left = sum(state.fleet.workers[member].slot != slot for member in state.members)
    idle = transition.state.idle_count
    if left + idle < state.settings.scaling.min_workers:
        low = state.settings.scaling.min_workers
        transition.say(f"{transition.name_of(worker)} is kept: {left + idle} would be left of at least {low}")
        return
    transition.set_fleet(evicted=(*state.fleet.evicted, slot))
    start_pause(transition, "evict", f"slot {slot} is released: {why}")


def leave_evicted(transition: Transition) -> bool:
    """Ask the generation, which trains, to end without the members in slots that were evicted since it began; True if
    it was asked."""
    state = transition.state
    evicted = frozenset(state.fleet.evicted)
    # Of every event: without an eviction, members are not looked at.
    slots = {state.fleet.workers[member].slot for member in state.members} & evicted if evicted else evicted
    stuck = state.saved.storage_failing and not state.settings.snapshots.enabled
    if not slots or stuck:
        return False
    names = ", ".join(map(str, sorted(slots)))
    start_pause(transition, "evict", f"slot {names} is released")
    return True


def give_back_evicted(transition: Transition) -> None:
    """Release evicted slots once the others train; keep them if the others cannot continue alone."""
    state, phase = transition.state, transition.state.phase
    if isinstance(phase, Training) and phase.first_step_done:
        for slot_id in state.fleet.evicted:
            slot = state.fleet.slots[slot_id]
            if any(worker.id in state.members for worker in transition.workers_in(slot_id)):
                continue
            if slot_id in state.fleet.ceded:
                transition.drop_slot(slot_id, "another run needs it")
                continue
            if slot.node is not None:
                transition.strike(slot.node, "the others continue without it", certain=True)
            transition.drop_slot(slot_id, "the others continue without it")
    elif isinstance(phase, Waiting) and state.idle_count < state.settings.scaling.min_workers:
        # A slot whose node's drain deadline is near cannot be kept.
        lost = tuple(slot for slot in state.fleet.evicted if _is_urgent(state, slot))
        if lost != state.fleet.evicted:
            transition.say("the run cannot continue without the slot that was to be released: it is kept")
            transition.set_fleet(evicted=lost)


def _is_urgent(state: RunState, slot: int) -> bool:
    notice = state.fleet.draining.get(state.fleet.slots[slot].node or "")
    return notice is not None and notice.urgent
