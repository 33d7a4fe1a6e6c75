"""Failure handling: opens incidents, spends budgets, decides the next attempt.

Escalation within one incident: the next generation starts in the same processes; if that fails without anybody being
lost, in fresh processes; checkpoints that fail their verification are passed over for the one before.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.actions import CloseIncident, EndGeneration, FinishRun, QuerySnapshots, ReleaseSlot
from elastic.core.checkpoint.snapshots import is_snapshot
from elastic.core.fleet import Members, Slots, Workers
from elastic.core.incident import Incident
from elastic.core.mesh import whole_cells
from elastic.core.run.budgets import anomaly_budget_spent, backoff_s, count_failure, most_node_losses
from elastic.core.run.phase import (
    GAVE_UP,
    INTEGRITY,
    USAGE,
    USER_CODE_FAILED,
    Ending,
    Finished,
    Joining,
    Pausing,
    Training,
    Waiting,
)
from elastic.core.run.state import RunState, Survey, WorkerPhase
from elastic.core.run.transition import Transition
from elastic.core.tables import Numbers
from elastic.core.wording import plural

# The strongest evidence that was seen names the incident; weaker evidence is kept with it. A lost process is stronger
# than an exception: user code that loses a peer in a collective may well raise something of its own.
_KINDS = (
    "resize", "stop", "collective-failed", "hang", "user-error", "out-of-memory", "mesh-refused", "anomaly", "audit",
    "worker-frozen", "worker-lost", "node-frozen", "node-lost", "restore-failed", "usage-error",
)  # fmt: skip
_STRENGTH = {name: rank for rank, name in enumerate(_KINDS)}
# A thousand ranks that all report the same broken collective are not a thousand pieces of evidence.
_ALSO = 20


def in_generation(state: RunState) -> bool:
    return isinstance(state.phase, Joining | Training | Pausing | Ending)


def open_incident(transition: Transition, kind: str, evidence: str, step: int, *, planned: bool = False) -> None:
    """Begin an incident, or add to the one that is being recovered from."""
    state, old = transition.state, transition.trouble.incident
    if old is not None:
        stronger = _STRENGTH[kind] > _STRENGTH[old.kind]
        weaker = old.evidence if stronger else evidence
        known = weaker == evidence == old.evidence or weaker in old.also or len(old.also) >= _ALSO
        transition.amend(
            kind=kind if stronger else old.kind,
            evidence=evidence if stronger else old.evidence,
            also=old.also if known else (*old.also, weaker),
            planned=planned and old.planned,
        )
        return
    incident = Incident(
        id=state.trouble.incidents + 1,
        kind=kind,
        generation=state.generation,
        world_size=state.world_size,
        step=step,
        evidence=evidence,
        planned=planned,
        times={"symptom": transition.now, "detected": transition.now},
    )
    transition.set_trouble(incident=incident, incidents=incident.id)


def backdate(transition: Transition, seconds: float) -> None:
    """The incident that this transition has opened began `seconds` ago: silence is noticed only afterwards."""
    incident = transition.trouble.incident
    if incident is not None and incident.times.get("symptom") == transition.now:
        transition.amend(times={**incident.times, "symptom": transition.now - seconds})


def record_loss(transition: Transition, workers: tuple[int, ...], node: str | None = None) -> None:
    """Write off members of the generation that is ending, in the incident and for the decision that follows."""
    incident, phase = transition.trouble.incident, transition.state.phase
    if not workers and node is None:
        return
    if isinstance(phase, Ending):
        transition.enter(replace(phase, lost=phase.lost.plus(workers)))
    if incident is None:
        return
    nodes = incident.lost_nodes + ((node,) if node and node not in incident.lost_nodes else ())
    # No worker is lost twice; where a whole cluster is, a look through all of them for each one would take minutes.
    known = phase.lost if isinstance(phase, Ending) else set(incident.lost_workers)
    transition.amend(
        lost_workers=incident.lost_workers + tuple(w for w in workers if w not in known),
        lost_nodes=nodes,
    )


def fail_generation(
    transition: Transition,
    kind: str,
    evidence: str,
    step: int | None = None,
    lost: tuple[int, ...] = (),
    node: str | None = None,
) -> None:
    """The generation cannot continue: tell every member that is still inside to leave.

    `lost` members are known to be gone; `node` is where they were, if it is gone too. Further reasons are added.
    """
    state, phase = transition.state, transition.state.phase
    reached = max(step or 0, state.furthest_step)
    transition.set(furthest_step=reached)
    open_incident(transition, kind, evidence, reached)
    if isinstance(phase, Ending):
        if _STRENGTH[kind] > _STRENGTH[phase.kind]:
            transition.enter(replace(phase, kind=kind, evidence=evidence))
        record_loss(transition, lost, node)
        return
    transition.enter(Ending(transition.now, transition.now + state.settings.failures.abort_timeout_s, kind, evidence))
    record_loss(transition, lost, node)
    transition.do(EndGeneration(state.generation, state.members_inside, evidence))
    # Without a report that names it, the step it ends at is known to the telemetry only, which the record carries.
    at = f" at step {step}" if step is not None else ""
    transition.say(f"generation {state.generation} ends{at}: {evidence}", evidence_kind=kind)


def end_unknown_generation(transition: Transition, number: int, known_by: str) -> None:
    """End a generation that the journal does not contain: its members, their last step and whether it continues are
    unknown. The remaining members are told to end it, and the next generation gets a higher number.

    `known_by` says how it is known, such as "workers know of".
    """
    for worker in tuple(transition.fleet.workers.starting):
        # It may have been ready since, and a member.
        transition.replace_worker(worker, "it is not known what has become of it")
    state = transition.state
    evidence = (
        f"the journal could not be written before the controller was restarted: it ends with generation "
        f"{state.generation}, and {known_by} generation {number}"
    )
    members = sorted(
        (worker for worker in state.fleet.workers.values() if worker.phase is not WorkerPhase.STARTING),
        key=lambda worker: (worker.slot, worker.id),
    )
    names = tuple(worker.id for worker in members)
    # On which mesh it was is unknown, too.
    transition.set(generation=number, members=Members(names), done_step=None, axes={})
    transition.set_saved(snapshots=(), survey=None)
    transition.enter_generation(names)
    open_incident(transition, "collective-failed", evidence, state.furthest_step)
    limit = transition.now + state.settings.failures.abort_timeout_s
    transition.enter(Ending(transition.now, limit, "collective-failed", evidence))
    transition.say(f"generation {number} ends: {evidence}", evidence_kind="collective-failed")


def end_found_generation(transition: Transition, number: int, known_by: str) -> None:
    """The same, and its members are told now: they may still be inside, and on a restart only those that answered were
    asked which generation they know."""
    end_unknown_generation(transition, number, known_by)
    state = transition.state
    transition.do(EndGeneration(number, state.members_inside, f"the controller had forgotten generation {number}"))


def resolve_ending(transition: Transition, phase: Ending) -> None:
    """Every member has left or was written off: decide what comes next."""
    transition.mark("decided", "fenced")
    transition.amend(step=transition.state.furthest_step)
    count_failure(transition, phase)
    streaks, limits = transition.trouble.streaks, transition.state.settings.failures
    if phase.kind == "usage-error":
        finish(transition, USAGE, phase.evidence)
    elif (reason := transition.state.gives_up_for) is not None:
        # What was to be saved could not be.
        finish(transition, GAVE_UP, reason)
    elif (reason := anomaly_budget_spent(transition.state)) is not None:
        _give_up(transition, reason)
    elif phase.kind == "user-error" and streaks.user_errors > limits.user_error_retries:
        tried = f" {streaks.user_errors} times in a row" if streaks.user_errors > 1 else ""
        finish(transition, USER_CODE_FAILED, f"the training function failed{tried}: {phase.evidence}")
    elif transition.saved.newest_checkpoint is None and any(
        not is_snapshot(name) for name in transition.saved.rejected
    ):
        # From the beginning would be a silent loss of everything: that is for a person to decide.
        evidence = phase.evidence if phase.kind == "restore-failed" else transition.saved.rejected[-1]
        finish(transition, INTEGRITY, f"no checkpoint is left that can be restored; the last one: {evidence}")
    elif streaks.crashes > limits.crash_streak or streaks.node_losses > most_node_losses(transition.state):
        failed = f"{streaks.crashes + streaks.node_losses} generations in a row failed without a new step or checkpoint"
        finish(transition, GAVE_UP, f"{failed}; the last one: {phase.evidence}")
    else:
        _go_on(transition, phase)


def _give_up(transition: Transition, reason: str) -> None:
    """The weights are good, and what the nodes' memory has of them would go with the run: it is saved first."""
    if not transition.state.settings.snapshots.enabled:
        finish(transition, GAVE_UP, reason)
        return
    transition.set(gives_up_for=reason)
    wait(transition, reason)


def _go_on(transition: Transition, phase: Ending) -> None:
    survivors, low = transition.state.idle_count, transition.state.settings.scaling.min_workers
    size = whole_cells(survivors, *transition.state.settings.mesh.cells)
    what = f"continue with {size}" if survivors >= low else f"wait for {plural(low - survivors, 'more worker')}"
    lost = f"{plural(len(phase.lost), 'worker')} lost" if phase.lost else "no worker lost"
    pause = backoff_s(transition.state)
    after = f" after {pause:.1f} s" if pause else ""
    transition.say(f"{lost}, {survivors} in good order (at least {low} needed): {what}{after}")
    transition.amend(
        action=what, alternatives=f"wait for {plural(transition.state.settings.scaling.max_workers, 'worker')}"
    )
    _escalate(transition)
    # If no member was seen to be lost, the connection between two members may be.
    wait(transition, what, pause, reach=phase.kind in ("hang", "collective-failed", "restore-failed"))


def wait(transition: Transition, reason: str, pause_s: float = 0.0, reach: bool = False) -> None:
    """No generation runs; the next one begins after `pause_s`, when there are enough workers."""
    not_before = transition.now + pause_s if pause_s else 0.0
    # Failed starts during a healthy generation do not count against this wait.
    transition.set(members=Members())
    transition.set_trouble(streaks=replace(transition.trouble.streaks, start_failures=0))
    transition.enter(Waiting(transition.now, reason, not_before))
    # One with a history may be among those who wait to be let in.
    query_snapshots(transition, reach or any(map(transition.fleet.slots.on, transition.fleet.quarantine)))


def query_snapshots(transition: Transition, reach: bool = False) -> None:
    """Ask the nodes what they hold, and with `reach` whom of each other they cannot reach.

    Any earlier answer is void: what it counted on may be gone.
    """
    state, settings = transition.state, transition.state.settings
    reach = reach or (state.saved.survey is not None and state.saved.survey.reach)
    if not settings.snapshots.enabled and not reach:
        return
    number = state.saved.surveys + 1
    deadline = transition.now + settings.failures.survey_timeout_s
    transition.set_saved(surveys=number, survey=Survey(number, deadline, reach), snapshots=())
    transition.do(QuerySnapshots(number, state.fleet.nodes, reach))


def finish(transition: Transition, status: str, reason: str) -> None:
    """The last transition of a run: everything is given back."""
    if transition.trouble.incident is not None:
        close_incident(transition)
    for slot in tuple(transition.fleet.slots):
        transition.do(ReleaseSlot(slot, f"the run is over: {status}"))
    transition.set_fleet(slots=Slots(), evicted=(), workers=Workers(), inside=Numbers())
    transition.set(members=Members(), phase=Finished(transition.now, status, reason))
    transition.set_trouble(suspicion=None)
    transition.set_saved(survey=None, snapshots=())
    transition.say(f"the run is over ({status}): {reason}", status=status)
    transition.do(FinishRun(status, reason))


def close_incident(transition: Transition) -> None:
    if transition.trouble.incident is not None:
        transition.do(CloseIncident(transition.trouble.incident))
        transition.set_trouble(incident=None)


def reject_checkpoint(transition: Transition, checkpoint: str, error: str) -> None:
    if checkpoint in transition.saved.rejected:
        return
    transition.set_saved(rejected=(*transition.saved.rejected, checkpoint))
    if is_snapshot(checkpoint):
        # What the nodes hold besides is asked when this generation has ended.
        transition.say(f"snapshot {checkpoint} is passed over: {error}; falling back to the next one", kind="integrity")
        return
    fallback = transition.saved.newest_state
    instead = f"falling back to {fallback.id} (step {fallback.step})" if fallback else "there is none before it"
    transition.say(f"checkpoint {checkpoint} is passed over: {error}; {instead}", kind="integrity")


def _escalate(transition: Transition) -> None:
    """Two generations that failed without a lost member may be the fault of the processes: start fresh ones."""
    if transition.trouble.streaks.in_place < 2:
        return
    failed = transition.trouble.streaks.in_place
    transition.say(f"{failed} generations failed in a row and nobody was lost: every worker process is replaced")
    for worker in [worker for _, workers in transition.state.idle_slots for worker in workers]:
        transition.replace_worker(worker, "two generations failed in this process")
    transition.set_trouble(streaks=replace(transition.trouble.streaks, in_place=0))
