"""Handling of stragglers: each is reported, and if the policy says so, its slot is released.

An eviction is a planned end like growth: all members stop after the same step and the others continue from it. The slot
is kept until they train, since the last step may exist in its node's memory only.
"""

from __future__ import annotations

from elastic.core.events import StragglerFound
from elastic.core.run.generations import start_pause
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.state import RunState
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
