"""How many slots the run asks for beside what it would like: what the cluster lacks, and what other runs need.

The facts are judged elsewhere (`core.capacity`, `core.sharing`) and arrive as events; here is what follows from them.
Making room is a planned end like growth: no step is repeated, and the slots are given back once the others train.
"""

from __future__ import annotations

from elastic.core.events import CapacityJudged, SlotsShared
from elastic.core.run.generations import start_pause
from elastic.core.run.phase import NO_CAPACITY, Training, Waiting
from elastic.core.run.recovery import finish
from elastic.core.run.state import RunState, SlotPhase
from elastic.core.run.transition import Transition


def capacity_judged(transition: Transition, event: CapacityJudged) -> None:
    """A run that has not begun is refused what cannot be had; one that has begun waits for what it had to come back."""
    state = transition.state
    transition.set_fleet(shortage=event.sentence)
    begun = state.generation != state.first_generation
    if event.never and not begun and isinstance(state.phase, Waiting):
        finish(transition, NO_CAPACITY, event.sentence)


def slots_shared(transition: Transition, event: SlotsShared) -> None:
    before = transition.state
    transition.set_fleet(slot_limit=event.limit, slot_limit_reason=event.reason)
    if event.limit is None:
        # What was not given back yet is kept.
        transition.set_fleet(
            evicted=tuple(slot for slot in before.fleet.evicted if slot not in before.fleet.ceded), ceded=()
        )
        transition.say("no other run needs this run's slots any more: it asks for as many as it may have", kind="share")
    elif event.limit < len(before.fleet.slots):
        transition.say(f"{_slots(len(before.fleet.slots))} -> {event.limit}: {event.reason}", kind="share")


def why_waiting(state: RunState, reason: str) -> str:
    """The policy's reason, and what the run has been told about the cluster."""
    held = ""
    if state.fleet.slot_limit is not None and state.fleet.slot_limit < state.settings.scaling.max_slots:
        held = f"no more than {_slots(state.fleet.slot_limit)} are asked for: {state.fleet.slot_limit_reason}"
    return "; ".join(filter(None, (reason, state.fleet.shortage, held)))


def keep_to_limit(transition: Transition) -> None:
    """Give back what is not in use beyond the limit: what has no place yet first, then the newest.

    While no generation runs, places are given back only by a run that cannot begin with those it has: in another one
    they may hold what the next generation begins from.
    """
    state, limit = transition.state, transition.state.max_slots
    if len(state.fleet.slots) <= limit:
        return  # As a rule, and with every event.
    # Those on nodes that are going away are replaced, and given back, for that reason.
    staying = [slot for slot in state.fleet.slots.values() if slot.node not in state.fleet.draining]
    surplus = len(staying) - limit
    if surplus <= 0:
        return
    carrying = state.carrying
    unused = [slot for slot in staying if slot.id not in carrying]
    training = isinstance(state.phase, Training) and state.phase.first_step_done
    least = state.settings.scaling.min_slots
    placed = sum(slot.phase is SlotPhase.PLACED for slot in state.fleet.slots.values())
    stuck = isinstance(state.phase, Waiting) and limit < least and placed < least
    if not training and not stuck:
        unused = [slot for slot in unused if slot.phase is SlotPhase.PENDING]
    unused.sort(key=lambda slot: (slot.phase is SlotPhase.PENDING, slot.id in state.fleet.ceded, slot.id))
    for slot in unused[max(0, len(unused) - surplus) :]:
        # Without another run there are too many when a node that was about to go stays after all.
        shared = limit < state.settings.scaling.max_slots
        transition.drop_slot(slot.id, "another run needs it" if shared else "there are enough without it")


def make_room(transition: Transition, phase: Training) -> bool:
    """Ask the generation to end without the members whose slots are too many; True when it has been asked."""
    state = transition.state
    if (
        state.fleet.slot_limit is None
        or phase.completed
        or (state.saved.storage_failing and not state.settings.snapshots.enabled)
    ):
        return False
    # Whatever others need: nothing that trains is stopped.
    keep = max(state.max_slots, state.settings.scaling.min_slots)
    going = sorted(state.carrying)[keep:]
    if not going:
        return False
    ceded = tuple(going)
    size = sum(state.fleet.workers[member].slot not in ceded for member in state.members)
    transition.set_fleet(
        evicted=tuple(dict.fromkeys((*state.fleet.evicted, *ceded))), ceded=(*state.fleet.ceded, *ceded)
    )
    start_pause(transition, "share", f"{state.fleet.slot_limit_reason}: {len(state.members)} -> {size}")
    return True


def _slots(count: int) -> str:
    return f"{count} slot{'s' * (count != 1)}"
