"""What is done about a rank that is slower than its peers: said, and where the policy says so, its slot is given back.

An eviction is a planned end like growth: all members stop after the same step and the others go on from it. The slot
is kept until they train, since the last step may lie in its node's memory only.
"""

from __future__ import annotations

from elastic.core.events import StragglerFound
from elastic.core.run.generations import start_pause
from elastic.core.run.state import RunState, Training, Waiting
from elastic.core.run.transition import Turn


def straggler_found(turn: Turn, event: StragglerFound) -> None:
    state = turn.state
    if event.worker not in state.members or event.worker not in state.workers:
        return  # Of one that has been written off since there is nothing left to say.
    settings, name = state.settings.stragglers, turn.name_of(event.worker)
    windows = f"{event.windows} windows of {settings.window_steps} steps running"
    told = (
        f"{name} needs {event.factor:.2f} times as long as its peers for its own part of a step "
        f"({event.own_s:.4g} s, they {event.peers_s:.4g} s), {windows}"
    )
    turn.say(told, kind="straggler", worker=event.worker, node=state.node_of(event.worker), factor=event.factor)
    if settings.policy == "evict" and event.confirmed:
        _evict(turn, event.worker, told)


def _evict(turn: Turn, worker: int, why: str) -> None:
    state = turn.state
    stage, slot = state.stage, state.workers[worker].slot
    if not isinstance(stage, Training) or stage.completed or not stage.first_step_done or state.stop_reason is not None:
        return
    left = sum(state.workers[member].slot != slot for member in state.members)
    idle = len(turn.idle_workers())
    if left + idle < state.settings.scaling.min_workers:
        low = state.settings.scaling.min_workers
        turn.say(f"{turn.name_of(worker)} is kept all the same: {left + idle} would be left of at least {low}")
        return
    turn.set(evicted=(*state.evicted, slot))
    start_pause(turn, "evict", f"slot {slot} is given back: {why}")


def give_back_evicted(turn: Turn) -> None:
    """Once the others train their memory has what is needed; where they cannot go on alone, it is taken back in."""
    state, stage = turn.state, turn.state.stage
    if isinstance(stage, Training) and stage.first_step_done:
        for slot_id in state.evicted:
            slot = state.slots[slot_id]
            if any(worker.id in state.members for worker in turn.workers_in(slot_id)):
                continue
            if slot_id in state.ceded:
                turn.drop_slot(slot_id, "another run needs it")
                continue
            if slot.node is not None:
                turn.strike(slot.node, "the others go on without it", certain=True)
            turn.drop_slot(slot_id, "the others go on without it")
    elif isinstance(stage, Waiting) and len(turn.idle_workers()) < state.settings.scaling.min_workers:
        # There is no way to keep one whose node is all but gone.
        lost = tuple(slot for slot in state.evicted if _is_urgent(state, slot))
        if lost != state.evicted:
            turn.say("the run cannot go on without the slot that was to be given back: it is kept")
            turn.set(evicted=lost)


def _is_urgent(state: RunState, slot: int) -> bool:
    notice = state.draining.get(state.slots[slot].node or "")
    return notice is not None and notice.urgent
