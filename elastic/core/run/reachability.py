"""What the nodes answer when they are asked what they hold and whom they reach; and who is left out for it.

Nodes that cannot talk to each other cannot train together, however well the controller hears both of them. They are
asked after a failure that nobody seems to be to blame for, and before a node with a history is let in beside a
generation that trains: it would be found out only when that generation has been ended for it.
"""

from __future__ import annotations

from elastic.core.checkpoint.snapshots import parse_snapshot_id
from elastic.core.events import MemorySurveyed
from elastic.core.policy.quarantine import left_out
from elastic.core.run.anomaly import counts
from elastic.core.run.recovery import record_loss, survey_memory
from elastic.core.run.state import KnownCheckpoint, RunState, Training, Waiting
from elastic.core.run.transition import Turn


def memory_surveyed(turn: Turn, event: MemorySurveyed) -> None:
    survey = turn.state.survey
    if survey is None or survey.number != event.survey:
        return
    good = (known for known in event.snapshots if counts(turn.state, parse_snapshot_id(known[0])[1], known[1]))
    turn.set(survey=None, snapshots=tuple(KnownCheckpoint(name, step) for name, step in good))
    if event.missing and not turn.state.snapshots:
        # Beside one that is whole, the newest may merely not have been complete yet.
        turn.say(f"nothing can be put together of what the nodes hold: {'; '.join(event.missing)}", kind="memory")
    if isinstance(turn.state.stage, Training):
        _let_in(turn, event.unreachable)
        return
    if isinstance(turn.state.stage, Waiting):
        # Of a generation that is in no journal, and in which nobody was who is left: its number is used as well.
        newest = max((parse_snapshot_id(name)[1] for name, _ in event.snapshots), default=0)
        turn.set(generation=max(turn.state.generation, newest))
    for node in left_out(turn.state.nodes, event.unreachable):
        _leave_out(turn, node, event.unreachable)
        # What it held went with it.
        survey_memory(turn)


def newcomers_reached(turn: Turn) -> bool:
    """May the generation be ended for the workers that wait? Asks first where one of their nodes has a history."""
    if not _doubtful(turn.state):
        return True
    if turn.state.survey is None:
        names = ", ".join(sorted(node[:8] for node in _doubtful(turn.state)))
        turn.say(f"before node {names} is let in again, it is asked whether it and the others reach each other")
        survey_memory(turn, reach=True)
    return False


def unanswered(turn: Turn) -> None:
    """Nobody has said anything in time; who is silent is for the heartbeats to judge."""
    if isinstance(turn.state.stage, Training):
        turn.set(reached=turn.state.reached | _doubtful(turn.state))


def _doubtful(state: RunState) -> frozenset[str]:
    """Nodes of waiting workers against which something is held, and of which nothing better is known yet."""
    waiting = {node for worker in state.idle if (node := state.node_of(worker.id)) is not None}
    trusted = {state.node_of(worker) for worker in state.members}
    return frozenset(waiting & state.quarantine.keys()) - trusted - state.reached


def _let_in(turn: Turn, unreachable: tuple[tuple[str, str], ...]) -> None:
    """Members are fine with each other, as their steps show: only a newcomer is left out."""
    doubtful = _doubtful(turn.state)
    members = {turn.state.node_of(worker) for worker in turn.state.members}
    cut = {node for pair in unreachable if members & set(pair) for node in pair} - members
    among = [pair for pair in unreachable if not cut & set(pair) and not members & set(pair)]
    newcomers = [node for node in turn.state.nodes if node not in members]
    for node in sorted(cut & set(newcomers)) + list(left_out(newcomers, among)):
        _leave_out(turn, node, unreachable)
    turn.set(reached=turn.state.reached | doubtful)


def _leave_out(turn: Turn, node: str, unreachable: tuple[tuple[str, str], ...]) -> None:
    others = sorted({who for pair in unreachable if node in pair for who in pair} - {node})
    why = f"it and {', '.join(name[:8] for name in others)} cannot reach each other"
    turn.strike(node, why, certain=True)
    for slot in [slot for slot in turn.state.slots.values() if slot.node == node]:
        record_loss(turn, tuple(worker.id for worker in turn.workers_in(slot.id)), node)
        turn.drop_slot(slot.id, why)
