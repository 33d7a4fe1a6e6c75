"""Failing storage: which workers cannot write, and how a run still saves its end.

Training continues without it. Where it is some ranks only that cannot write, it is their way to it that is cut: nothing
becomes a checkpoint without their parts, and what they hold is in the memory of the nodes.
"""

from __future__ import annotations

from elastic.core.events import SaveFailing
from elastic.core.run.phase import Closing
from elastic.core.run.recovery import open_incident, wait
from elastic.core.run.state import RunState, WorkerPhase
from elastic.core.run.transition import Transition

# At most this many workers are named; if more fail, storage itself is away.
_NAMED = 8


def save_failing(transition: Transition, event: SaveFailing) -> None:
    """Noted once per worker, until a checkpoint is complete again."""
    state, worker = transition.state, event.worker
    news = not state.saved.storage_failing if worker is None else worker not in state.saved.cannot_save
    transition.set_saved(storage_failing=True)
    if worker is not None and news:
        transition.set_saved(cannot_save=(*state.saved.cannot_save, worker))
    if not news or len(transition.saved.cannot_save) > _NAMED + 1:
        return
    what = f"the checkpoint of step {event.step} could not be written: {event.error}"
    if worker is not None:
        what = (
            f"{transition.name_of(worker)} cannot write its part of the checkpoint of step {event.step}: {event.error}"
        )
    if len(transition.saved.cannot_save) > _NAMED:
        what = f"more than {_NAMED} workers cannot write to storage; the rest are not named"
    again = f"next try in {event.retry_s:.1f} s" if event.retry_s else "the next checkpoint is tried"
    transition.say(f"{what}; training continues, {again}", kind="storage")


def who_cannot_save(transition: Transition) -> str:
    """As the end of a sentence about storage; "" where no worker has said so."""
    names = [transition.name_of(worker) for worker in transition.saved.cannot_save]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f": {', '.join(names[:_NAMED])}{more} cannot write to it" if names else ""


def kept_in_memory(state: RunState) -> bool:
    """Whether a generation may end as planned without storage: the nodes' memory takes its last step."""
    return state.settings.snapshots.enabled and state.saved.memory_lost_in < state.generation


def save_without(transition: Transition, phase: Closing) -> bool:
    """All steps are done: the workers that can write load the last step from the nodes' memory and save it. True if
    they are enough. The other slots are kept until then: their nodes' memory may hold what is needed."""
    state = transition.state
    cut = tuple(dict.fromkeys(state.fleet.workers[w].slot for w in state.saved.cannot_save if w in state.fleet.workers))
    rest = [w for w in state.fleet.workers.values() if w.phase is not WorkerPhase.STARTING and w.slot not in cut]
    if not cut or not kept_in_memory(state) or len(rest) < state.settings.scaling.min_workers:
        return False
    why = f"storage has not taken the checkpoint of step {phase.step}{who_cannot_save(transition)}; the others save it"
    open_incident(transition, "resize", why, phase.step, planned=True)
    transition.say(f"generation {state.generation} is over, the next one starts without them: {why}", kind="storage")
    transition.leave_generation(state.members_inside)
    transition.set_fleet(evicted=tuple(dict.fromkeys((*state.fleet.evicted, *cut))))
    transition.mark("decided", "fenced")
    transition.amend(step=transition.state.furthest_step)
    wait(transition, "every member has done the last step")
    return True
