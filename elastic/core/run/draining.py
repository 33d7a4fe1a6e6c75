"""Nodes that are about to go: what a notice changes, and when the run leaves such a node.

A notice comes from Ray (a preemption warning, an administrator, the end of `ray start --block`). At once another slot
is asked for in the place of each on such a node, and no generation begins there while there are workers elsewhere. The
members go on training until the others can do without them: a replacement that is starting is waited for, so that the
world size stays; else they leave after a few seconds and the run shrinks. Where too few are left, the run trains on
until shortly before the deadline, saves to storage, and waits for nodes. Like growth, leaving is a planned end at a
step boundary: no step is repeated. A node that goes earlier than it said is a lost node.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events import NodesDraining
from elastic.core.run.generations import start_pause
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.recovery import query_snapshots
from elastic.core.run.state import Notice, RunState, WorkerPhase
from elastic.core.run.transition import Transition


def nodes_draining(transition: Transition, event: NodesDraining) -> None:
    """The whole list, as it is now."""
    old = transition.fleet.draining
    new = {node: _notice(old.get(node), deadline, transition.now) for node, deadline in event.nodes}
    transition.set_fleet(draining=new)
    used = set(transition.fleet.nodes)
    for node in sorted((new.keys() - old.keys()) & used):
        transition.say(f"node {node[:8]} is going away{_when(new[node], transition.now)}", kind="drain", node=node)
    for node in sorted((old.keys() - new.keys()) & used):
        transition.say(f"node {node[:8]} is no longer about to go away", kind="drain", node=node)


def _notice(old: Notice | None, deadline: float, now: float) -> Notice:
    if old is not None and old.deadline == deadline:
        return old
    # A deadline that is moved is a new one; the waiting for a replacement does not begin anew.
    return Notice(old.since if old else now, deadline, old.gathering if old else True)


def _when(notice: Notice, now: float) -> str:
    return f" in {max(0.0, notice.deadline - now):.0f} s" if notice.deadline else ", without saying when"


def notices_ripen(transition: Transition) -> None:
    """Time passes: a replacement has been waited for, a deadline is near."""
    for node, notice in transition.fleet.draining.items():
        gathering = notice.gathering and not transition.passed(_gathers_until(transition.state, notice))
        urgent = notice.urgent or (notice.deadline > 0 and transition.passed(_leave_by(transition.state, notice)))
        if (gathering, urgent) != (notice.gathering, notice.urgent):
            changed = replace(notice, gathering=gathering, urgent=urgent)
            transition.set_fleet(draining={**transition.fleet.draining, node: changed})


def next_ripening(state: RunState) -> list[float]:
    """When the rule above has something to do."""
    gathering = [_gathers_until(state, notice) for notice in state.fleet.draining.values() if notice.gathering]
    near = [_leave_by(state, n) for n in state.fleet.draining.values() if n.deadline > 0 and not n.urgent]
    return gathering + near


def _gathers_until(state: RunState, notice: Notice) -> float:
    return notice.since + state.settings.scaling.gather_s


def _leave_by(state: RunState, notice: Notice) -> float:
    """A notice that is shorter than the margin leaves no time to lose."""
    return max(notice.since, notice.deadline - state.settings.failures.drain_margin_s)


def leave_draining(transition: Transition, phase: Training) -> bool:
    """Ask the generation to end without the members on nodes that are going; True when it has been asked."""
    state = transition.state
    going = {w for w in state.members if state.fleet.node_of(w) in state.fleet.draining}
    if not going:
        return False
    low = state.settings.scaling.min_workers
    staying = len(state.members) - len(going) + len(state.idle)
    size = min(staying, state.settings.scaling.max_workers)
    notices = [state.fleet.draining[node] for node in {state.fleet.node_of(w) for w in going} if node is not None]
    urgent = any(notice.urgent for notice in notices)
    replaced = size >= len(state.members)
    hopeful = any(notice.gathering for notice in notices) or _arriving(state)
    if staying < low and not urgent:
        return False
    if staying >= low and hopeful and not replaced and not urgent:
        return False
    nodes = sorted({node for w in going if (node := state.fleet.node_of(w)) is not None})
    names = ", ".join(node[:8] for node in nodes)
    what = f"{len(state.members)} -> {size}" if staying >= low else f"{staying} would be left of at least {low}"
    transition.set_fleet(
        evicted=tuple(dict.fromkeys((*state.fleet.evicted, *(state.fleet.workers[w].slot for w in going))))
    )
    # With too few left nothing trains for a while, and their memory may go as well.
    start_pause(transition, "drain", f"node {names} is going away: {what}", durable=True if staying < low else None)
    return True


def _arriving(state: RunState) -> bool:
    """A worker is being prepared on a node that stays."""
    starting = (w for w in state.fleet.workers.values() if w.phase is WorkerPhase.STARTING)
    return any(state.fleet.node_of(worker.id) not in state.fleet.draining for worker in starting)


def drop_left(transition: Transition) -> None:
    """Once the others train, what is left on a node that is going is given back."""
    phase = transition.state.phase
    if isinstance(phase, Waiting):
        _drop_saved(transition)
    if not isinstance(phase, Training) or not phase.first_step_done:
        return
    carrying = transition.state.carrying
    for slot in tuple(transition.fleet.slots.values()):
        if slot.node in transition.fleet.draining and slot.id not in carrying:
            transition.drop_slot(slot.id, "its node is going away")


def _drop_saved(transition: Transition) -> None:
    """Where too few are left to train: what is all but gone is given back at once if storage has everything, so that
    Ray can end the node, which it does as soon as nothing is there."""
    newest = transition.saved.newest_checkpoint
    if newest is None or newest.step < transition.state.furthest_step:
        return
    urgent = {node for node, notice in transition.fleet.draining.items() if notice.urgent}
    going = [slot.id for slot in transition.fleet.slots.values() if slot.node in urgent]
    for slot_id in going:
        transition.drop_slot(slot_id, "its node is going away, and everything is saved")
    if going and transition.saved.surveys:
        # What it held went with it, and the last survey may have counted on that.
        query_snapshots(transition)
