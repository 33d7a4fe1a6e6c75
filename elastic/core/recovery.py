"""What is done about failures: incidents are opened, budgets are spent, the next attempt is decided.

Escalation within one incident: the next generation starts in the same processes; if that fails without anybody being
lost, in fresh processes; checkpoints that cannot be proven good are passed over for the one before.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.actions import CloseIncident, EndGeneration, FinishRun, ReleaseSlot
from elastic.core.incident import Incident
from elastic.core.state import (
    GAVE_UP,
    INTEGRITY,
    USAGE,
    USER_CODE_FAILED,
    Ending,
    Finished,
    Joining,
    Pausing,
    RunState,
    Streaks,
    Training,
    Waiting,
)
from elastic.core.turn import Turn

# The strongest evidence that was seen names the incident; weaker evidence is kept beside it.
_KINDS = (
    "resize", "stop", "collective-failed", "hang", "worker-frozen", "worker-lost", "node-frozen", "node-lost",
    "restore-failed", "user-error", "usage-error",
)  # fmt: skip
_STRENGTH = {name: rank for rank, name in enumerate(_KINDS)}


def in_generation(state: RunState) -> bool:
    return isinstance(state.stage, Joining | Training | Pausing | Ending)


def open_incident(turn: Turn, kind: str, evidence: str, step: int, *, planned: bool = False) -> None:
    """Begin an incident, or add to the one that is being recovered from."""
    state = turn.state
    if state.incident is not None:
        stronger = _STRENGTH[kind] > _STRENGTH[state.incident.kind]
        turn.amend(
            kind=kind if stronger else state.incident.kind,
            evidence=evidence if stronger else state.incident.evidence,
            also=(*state.incident.also, state.incident.evidence if stronger else evidence),
            planned=planned and state.incident.planned,
        )
        return
    incident = Incident(
        id=state.incidents + 1,
        kind=kind,
        generation=state.generation,
        world_size=state.world_size,
        step=step,
        evidence=evidence,
        planned=planned,
        times={"symptom": turn.now, "detected": turn.now},
    )
    turn.set(incident=incident, incidents=incident.id)


def record_loss(turn: Turn, workers: tuple[int, ...], node: str | None = None) -> None:
    incident = turn.state.incident
    if incident is None:
        return
    nodes = incident.lost_nodes + ((node,) if node and node not in incident.lost_nodes else ())
    known = set(incident.lost_workers)
    turn.amend(
        lost_workers=incident.lost_workers + tuple(w for w in workers if w not in known),
        lost_nodes=nodes,
    )


def fail_generation(turn: Turn, kind: str, evidence: str, step: int | None = None) -> None:
    """The generation cannot go on: tell every member that is still inside to leave."""
    state = turn.state
    reached = max(step or 0, state.furthest_step)
    turn.set(furthest_step=reached)
    open_incident(turn, kind, evidence, reached)
    if isinstance(state.stage, Ending):
        return
    turn.enter(Ending(turn.now, turn.now + state.settings.failures.abort_timeout_s))
    turn.do(EndGeneration(state.generation, state.members_inside, evidence))
    turn.say(f"generation {state.generation} ends at step {reached}: {evidence}", evidence_kind=kind)


def resolve_ending(turn: Turn) -> None:
    """Every member has left or was written off: decide what comes next."""
    turn.mark("decided", "fenced")
    incident = turn.state.incident
    _count_failure(turn)
    streaks, limits = turn.state.streaks, turn.state.settings.failures
    kind = incident.kind if incident else ""
    survivors = len(turn.idle_workers())
    turn.set(members=())
    if kind == "usage-error":
        finish(turn, USAGE, incident.evidence if incident else "")
    elif kind == "user-error" and streaks.user_errors > limits.user_error_retries:
        tried = f" {streaks.user_errors} times in a row" if streaks.user_errors > 1 else ""
        finish(turn, USER_CODE_FAILED, f"the training function failed{tried}: {incident.evidence if incident else ''}")
    elif kind == "restore-failed" and turn.state.rejected and turn.state.newest_checkpoint is None:
        finish(turn, INTEGRITY, f"no checkpoint is left that can be restored; the last one: {_evidence(turn)}")
    elif streaks.crashes > limits.crash_streak:
        finish(
            turn,
            GAVE_UP,
            f"{streaks.crashes} generations in a row failed without a new step or checkpoint; {_evidence(turn)}",
        )
    else:
        _escalate(turn)
        pause = _backoff(turn.state)
        what = f"go on with {survivors} survivors" if survivors else "start again"
        turn.amend(action=what, alternatives=f"wait for {turn.state.settings.scaling.max_workers} workers")
        turn.enter(Waiting(turn.now, what, not_before=turn.now + pause))
        lost = f"{len(incident.lost_workers)} workers lost" if incident and incident.lost_workers else "no worker lost"
        turn.say(f"{lost}, {survivors} left in good order; {what}" + (f" after {pause:.1f} s" if pause else ""))


def finish(turn: Turn, status: str, reason: str) -> None:
    """The last transition of a run: everything is given back."""
    if turn.state.incident is not None:
        close_incident(turn)
    for slot in tuple(turn.state.slots):
        turn.do(ReleaseSlot(slot, f"the run is over: {status}"))
    turn.set(slots={}, workers={}, members=(), suspicion=None, stage=Finished(turn.now, status, reason))
    turn.say(f"the run is over ({status}): {reason}", status=status)
    turn.do(FinishRun(status, reason))


def close_incident(turn: Turn) -> None:
    if turn.state.incident is not None:
        turn.do(CloseIncident(turn.state.incident))
        turn.set(incident=None)


def reject_checkpoint(turn: Turn, checkpoint: str, error: str) -> None:
    if checkpoint in turn.state.rejected:
        return
    turn.set(rejected=(*turn.state.rejected, checkpoint))
    fallback = turn.state.newest_checkpoint
    instead = f"falling back to {fallback.id} (step {fallback.step})" if fallback else "there is none before it"
    turn.say(f"checkpoint {checkpoint} is passed over: {error}; {instead}", kind="integrity")


def _evidence(turn: Turn) -> str:
    return turn.state.incident.evidence if turn.state.incident else "unknown"


def _count_failure(turn: Turn) -> None:
    """Spend the budgets: a streak grows unless the run got further than at the failure before."""
    state, incident = turn.state, turn.state.incident
    newest = state.newest_checkpoint
    reached = (state.furthest_step, newest.step if newest else -1)
    streaks = state.streaks
    progressed = reached[0] > streaks.mark[0] or reached[1] > streaks.mark[1]
    if progressed:
        streaks = Streaks(start_failures=streaks.start_failures)
    kind = incident.kind if incident else ""
    nobody_lost = incident is None or not incident.lost_workers
    turn.set(
        streaks=replace(
            streaks,
            # Passing over a bad checkpoint is bounded by the number of checkpoints and is not a crash.
            crashes=streaks.crashes + (kind != "restore-failed"),
            user_errors=streaks.user_errors + (kind == "user-error"),
            in_place=streaks.in_place + 1 if nobody_lost and kind in ("collective-failed", "hang") else 0,
            mark=(max(reached[0], streaks.mark[0]), reached[1]),
        )
    )


def _escalate(turn: Turn) -> None:
    """A generation that failed twice with nobody lost may be the fault of the processes: start fresh ones."""
    if turn.state.streaks.in_place < 2:
        return
    failed = turn.state.streaks.in_place
    turn.say(f"{failed} generations failed in a row and nobody was lost: every worker process is replaced")
    for worker in turn.idle_workers():
        turn.replace_worker(worker.id, "two generations failed in this process")
    turn.set(streaks=replace(turn.state.streaks, in_place=0))


def _backoff(state: RunState) -> float:
    """No pause after a first failure; then base * 2**n up to the limit."""
    failures = state.settings.failures
    again = state.streaks.crashes - 2
    if again < 0:
        return 0.0
    return float(min(failures.retry_backoff_s * 2.0 ** min(again, 30), failures.retry_backoff_limit_s))
