"""Handling of the nodes' answers: which snapshots they hold, which nodes they reach, and which node is left out.

Nodes that cannot talk to each other cannot train together, however well the controller hears both of them. They are
asked after a failure that nobody seems to be to blame for, and before a node with a history is admitted together with a
generation that trains: it would be found out only when that generation has been ended for it.
"""

from __future__ import annotations

from elastic.core.checkpoint.snapshots import Copies, parse_snapshot_id
from elastic.core.events import SnapshotsReported
from elastic.core.policy.quarantine import left_out
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.recovery import end_found_generation, query_snapshots, record_loss
from elastic.core.run.state import KnownCheckpoint, RunState
from elastic.core.run.transition import Transition


def snapshots_reported(transition: Transition, event: SnapshotsReported) -> None:
    survey = transition.saved.survey
    if survey is None or survey.number != event.survey:
        return
    good = (known for known in event.snapshots if transition.trouble.counts(parse_snapshot_id(known[0])[1], known[1]))
    transition.set_saved(
        survey=None,
        snapshots=tuple(KnownCheckpoint(name, step) for name, step in good),
        copies=Copies(event.ranks, event.copies),
    )
    if event.missing and not transition.saved.snapshots:
        # If another snapshot is whole, the newest may merely have been incomplete.
        transition.say(f"no snapshot on the nodes is complete: {'; '.join(event.missing)}", kind="memory")
    if isinstance(transition.state.phase, Training):
        _let_in(transition, event.unreachable)
        return
    # A snapshot may belong to a generation that neither the journal nor a worker that answered knows.
    newest = max((parse_snapshot_id(name)[1] for name, _ in event.snapshots), default=0)
    if isinstance(transition.state.phase, Waiting) and newest > transition.state.generation:
        end_found_generation(transition, newest, "nodes hold snapshots of")
        return
    for node in left_out(transition.fleet.nodes, event.unreachable):
        _leave_out(transition, node, event.unreachable)
        # Its snapshots are gone with it.
        query_snapshots(transition)


def newcomers_reached(transition: Transition) -> bool:
    """May the generation be ended for the workers that wait? Asks first where one of their nodes has a history."""
    if not _doubtful(transition.state):
        return True
    if transition.saved.survey is None:
        names = ", ".join(sorted(node[:8] for node in _doubtful(transition.state)))
        transition.say(f"before node {names} is used again, the nodes check whether they reach each other")
        query_snapshots(transition, reach=True)
    return False


def unanswered(transition: Transition) -> None:
    """No node has answered in time; heartbeats judge which nodes are silent."""
    if isinstance(transition.state.phase, Training):
        transition.set_fleet(reached=transition.fleet.reached | _doubtful(transition.state))


def _doubtful(state: RunState) -> frozenset[str]:
    """Nodes of waiting workers against which something is held, and of which nothing better is known yet."""
    waiting = {slot.node for slot, _ in state.idle_slots if slot.node is not None}
    trusted = {state.fleet.node_of(worker) for worker in state.members}
    return frozenset(waiting & state.fleet.quarantine.keys()) - trusted - state.fleet.reached


def _let_in(transition: Transition, unreachable: tuple[tuple[str, str], ...]) -> None:
    """The members reach each other, as their steps show: only a new node is left out."""
    doubtful = _doubtful(transition.state)
    members = {transition.fleet.node_of(worker) for worker in transition.state.members}
    cut = {node for pair in unreachable if members & set(pair) for node in pair} - members
    among = [pair for pair in unreachable if not cut & set(pair) and not members & set(pair)]
    newcomers = [node for node in transition.fleet.nodes if node not in members]
    for node in sorted(cut & set(newcomers)) + list(left_out(newcomers, among)):
        _leave_out(transition, node, unreachable)
    transition.set_fleet(reached=transition.fleet.reached | doubtful)


def _leave_out(transition: Transition, node: str, unreachable: tuple[tuple[str, str], ...]) -> None:
    others = sorted({who for pair in unreachable if node in pair for who in pair} - {node})
    why = f"it and {', '.join(name[:8] for name in others)} cannot reach each other"
    transition.strike(node, why, certain=True)
    for slot in transition.fleet.slots.on(node):
        record_loss(transition, tuple(worker.id for worker in transition.workers_in(slot)), node)
        transition.drop_slot(slot, why)
