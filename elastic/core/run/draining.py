"""Draining nodes: the effect of a drain notice, and when the run leaves such a node.

Ray issues the notice (a preemption warning, an administrator, the end of `ray start --block`). The run requests a
replacement for each slot on the node at once, and starts no generation there while it has workers elsewhere. The
members on the node keep training until they can be replaced: if a replacement is starting, the run waits for it and
keeps its world size; otherwise they leave after a few seconds and the run shrinks. If too few workers would remain, the
run trains until shortly before the deadline, saves to storage, and waits for nodes. Like growth, leaving is a planned
end at a step boundary: no step is repeated. A node that is gone before its deadline is a lost node.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.events import NodesDraining
from elastic.core.mesh import whole_cells
from elastic.core.run.generations import start_pause
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.recovery import query_snapshots
from elastic.core.run.state import Notice, RunState
from elastic.core.run.transition import Transition


def nodes_draining(transition: Transition, event: NodesDraining) -> None:
    """The event carries the whole list of draining nodes."""
    old = transition.fleet.draining
    new = {node: _notice(old.get(node), deadline, transition.now) for node, deadline in event.nodes}
    transition.set_fleet(draining=new)
    used = set(transition.fleet.nodes)
    for node in sorted((new.keys() - old.keys()) & used):
        transition.say(f"node {node[:8]} is going away{_when(new[node], transition.now)}", kind="drain", node=node)
    for node in sorted((old.keys() - new.keys()) & used):
        transition.say(f"node {node[:8]} is no longer draining", kind="drain", node=node)


def _notice(old: Notice | None, deadline: float, now: float) -> Notice:
    if old is not None and old.deadline == deadline:
        return old
    # A moved deadline replaces the old one; the wait for a replacement does not restart.
    return Notice(old.since if old else now, deadline, old.gathering if old else True)


def _when(notice: Notice, now: float) -> str:
    return f" in {max(0.0, notice.deadline - now):.0f} s" if notice.deadline else ", without a deadline"


def notices_ripen(transition: Transition) -> None:
    """Update the notices whose wait for a replacement is over or whose deadline is near."""
    for node, notice in transition.fleet.draining.items():
        gathering = notice.gathering and not transition.passed(_gathers_until(transition.state, notice))
        urgent = notice.urgent or (notice.deadline > 0 and transition.passed(_leave_by(transition.state, notice)))
        if (gathering, urgent) != (notice.gathering, notice.urgent):
            changed = replace(notice, gathering=gathering, urgent=urgent)
            transition.set_fleet(draining={**transition.fleet.draining, node: changed})


def next_ripening(state: RunState) -> list[float]:
    """The times at which `notices_ripen` changes something."""
    gathering = [_gathers_until(state, notice) for notice in state.fleet.draining.values() if notice.gathering]
    near = [_leave_by(state, n) for n in state.fleet.draining.values() if n.deadline > 0 and not n.urgent]
    return gathering + near


def _gathers_until(state: RunState, notice: Notice) -> float:
    return notice.since + state.settings.scaling.gather_s


def _leave_by(state: RunState, notice: Notice) -> float:
    """At once if the notice is shorter than the margin."""
    return max(notice.since, notice.deadline - state.settings.failures.drain_margin_s)


def leave_draining(transition: Transition, phase: Training) -> bool:
    """Ask the generation to end without the members on draining nodes; True if it was asked."""
    state = transition.state
    slots = (slot for node in state.fleet.draining for slot in state.fleet.slots.on(node))
    going = {w.id for slot in slots for w in transition.workers_in(slot) if w.id in state.members}
    if not going:
        return False
    low = state.settings.scaling.min_workers
    staying = len(state.members) - len(going) + state.idle_count
    size = whole_cells(min(staying, state.settings.scaling.max_workers), *state.settings.mesh.cells)
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
    # With too few workers left no generation runs for a while, and the nodes' memory may be lost meanwhile.
    start_pause(transition, "drain", f"node {names} is going away: {what}", durable=True if staying < low else None)
    return True


def _arriving(state: RunState) -> bool:
    """True while a worker is starting on a node that is not draining."""
    return any(state.fleet.node_of(worker) not in state.fleet.draining for worker in state.fleet.workers.starting)


def drop_left(transition: Transition) -> None:
    """Release the slots on draining nodes once the other workers train."""
    phase = transition.state.phase
    if isinstance(phase, Waiting):
        _drop_saved(transition)
    if not isinstance(phase, Training) or not phase.first_step_done:
        return
    members, slots = transition.state.members, transition.fleet.slots
    for slot in sorted(slot for node in transition.fleet.draining for slot in slots.on(node)):
        if not any(worker.id in members for worker in transition.workers_in(slot)):
            transition.drop_slot(slot, "its node is draining")


def _drop_saved(transition: Transition) -> None:
    """While too few workers are left to train: release the slots whose deadline is near if storage has everything.
    Ray ends a draining node as soon as it is idle."""
    newest = transition.saved.newest_checkpoint
    if newest is None or newest.step < transition.state.furthest_step:
        return
    urgent = {node for node, notice in transition.fleet.draining.items() if notice.urgent}
    going = sorted(slot for node in urgent for slot in transition.fleet.slots.on(node))
    for slot_id in going:
        transition.drop_slot(slot_id, "its node is draining, and everything is saved")
    if going and transition.saved.surveys:
        # Its node's snapshots are gone, and the last survey may have counted them.
        query_snapshots(transition)
