"""Limits of the run's demand for slots: what the cluster lacks, and what other runs need.

`core.policy.capacity` and `core.policy.priority_sharing` judge the facts, which arrive as events; this module acts on
them. Making room is a planned end like growth: no step is repeated, and slots are released once the others train.
"""

from __future__ import annotations

from elastic.core.events import CapacityJudged, SlotsShared
from elastic.core.run.generations import start_pause
from elastic.core.run.phase import NO_CAPACITY, Training, Waiting
from elastic.core.run.recovery import finish
from elastic.core.run.state import RunState, SlotPhase
from elastic.core.run.transition import Transition
from elastic.core.wording import plural


def capacity_judged(transition: Transition, event: CapacityJudged) -> None:
    """A run that has not started is refused if it can never get its slots; a run that has started waits for them."""
    state = transition.state
    transition.set_fleet(shortage=event.sentence)
    started = state.generation != state.first_generation
    if event.never and not started and isinstance(state.phase, Waiting):
        finish(transition, NO_CAPACITY, event.sentence)


def slots_shared(transition: Transition, event: SlotsShared) -> None:
    before = transition.state
    transition.set_fleet(slot_limit=event.limit, slot_limit_reason=event.reason)
    if event.limit is None:
        # Keep the slots that were not released yet.
        transition.set_fleet(
            evicted=tuple(slot for slot in before.fleet.evicted if slot not in before.fleet.ceded), ceded=()
        )
        transition.say("no other run needs this run's slots any more: requesting up to max_workers again", kind="share")
    elif event.limit < len(before.fleet.slots):
        transition.say(f"{plural(len(before.fleet.slots), 'slot')} -> {event.limit}: {event.reason}", kind="share")


def why_waiting(state: RunState, reason: str) -> str:
    """The policy's reason, the shortage of the cluster, and the limit set by other runs."""
    held = ""
    if state.fleet.slot_limit is not None and state.fleet.slot_limit < state.settings.scaling.max_slots:
        held = f"requesting at most {plural(state.fleet.slot_limit, 'slot')}: {state.fleet.slot_limit_reason}"
    return "; ".join(filter(None, (reason, state.fleet.shortage, held)))


def keep_to_limit(transition: Transition) -> None:
    """Release unused slots beyond the limit: pending ones first, then the newest.

    While no generation runs, placed slots are released only if the run has too few of them to start: otherwise they may
    hold the snapshots from which the next generation starts.
    """
    state, limit = transition.state, transition.state.max_slots
    # Slots on draining nodes are replaced and released by `draining`.
    surplus = state.fleet.staying_slots - limit
    if surplus <= 0:
        return  # The usual case; this runs after every event.
    staying = [slot for slot in state.fleet.slots.values() if slot.node not in state.fleet.draining]
    carrying = state.carrying
    unused = [slot for slot in staying if slot.id not in carrying]
    training = isinstance(state.phase, Training) and state.phase.first_step_done
    least = state.settings.scaling.min_slots
    placed = len(state.fleet.slots) - len(state.fleet.slots.pending)
    stuck = isinstance(state.phase, Waiting) and limit < least and placed < least
    if not training and not stuck:
        unused = [slot for slot in unused if slot.phase is SlotPhase.PENDING]
    unused.sort(key=lambda slot: (slot.phase is SlotPhase.PENDING, slot.id in state.fleet.ceded, slot.id))
    for slot in unused[max(0, len(unused) - surplus) :]:
        # Without a limit by other runs there are too many only if a draining node stays after all.
        shared = limit < state.settings.scaling.max_slots
        transition.drop_slot(slot.id, "another run needs it" if shared else "there are enough slots without it")


def make_room(transition: Transition, phase: Training) -> bool:
    """Ask the generation to end without the members in surplus slots; True if it was asked."""
    state = transition.state
    if (
        state.fleet.slot_limit is None
        or phase.completed
        or (state.saved.storage_failing and not state.settings.snapshots.enabled)
    ):
        return False
    # Never go below the minimum: a run that trains is not stopped for another one.
    keep = max(state.max_slots, state.settings.scaling.min_slots)
    # Every member is in a slot: the usual case needs no look at them.
    going = sorted(state.carrying)[keep:] if len(state.fleet.slots) > keep else []
    if not going:
        return False
    ceded = tuple(going)
    size = sum(state.fleet.workers[member].slot not in ceded for member in state.members)
    transition.set_fleet(
        evicted=tuple(dict.fromkeys((*state.fleet.evicted, *ceded))), ceded=(*state.fleet.ceded, *ceded)
    )
    start_pause(transition, "share", f"{state.fleet.slot_limit_reason}: {len(state.members)} -> {size}")
    return True
