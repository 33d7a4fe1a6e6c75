"""Handling of steps with a non-finite loss or gradient: the generation ends, and the samples are left out.

And of steps that ranks computed differently: the generation ends, and the step is done again with the same samples.
"""

from __future__ import annotations

from elastic.core.data.steps import Range, union
from elastic.core.events import AnomalyFound, AuditFailed, StepSkipped
from elastic.core.run.budgets import anomaly_budget_spent
from elastic.core.run.recovery import fail_generation
from elastic.core.run.state import Anomaly, KnownCheckpoint, RunState
from elastic.core.run.transition import Transition
from elastic.core.wording import plural

_KEPT = 100


def anomaly_found(transition: Transition, event: AnomalyFound) -> None:
    """Reported by every member, for the same step. The first report decides; the others add evidence."""
    state = transition.state
    if event.worker not in state.members:
        return
    evidence = f"{transition.name_of(event.worker)}: the {event.kind} of step {event.step + 1} is {event.value}"
    if not any(known.undone and known.generation == event.generation for known in state.trouble.anomalies):
        _remember(transition, Anomaly(event.generation, event.step, evidence, undone=True))
        _forget_what_lies_behind(transition, event.step)
        if state.settings.anomalies.policy == "rollback":
            _leave_out(transition, event, evidence)
    fail_generation(transition, "anomaly", evidence, event.step)


def audit_failed(transition: Transition, event: AuditFailed) -> None:
    """Reported by every member alike; the first report decides."""
    state = transition.state
    if event.worker not in state.members:
        return
    suspects = [state.members[rank] for rank in event.suspects if rank < len(state.members)]
    named = ", ".join(map(transition.name_of, suspects))
    verdict = f"wrong: {named}" if event.decided else f"either of {named} is wrong"
    evidence = f"audit of step {event.step + 1}: {event.evidence}; {verdict}"
    if not any(known.undone and known.generation == event.generation for known in state.trouble.anomalies):
        step = event.step if event.sound_step is None else min(event.step, event.sound_step)
        if event.agreed_step is not None:
            transition.set_trouble(agreed_step=min(event.agreed_step, step))
        trusted = _trusted(transition.state)
        back = trusted is not None and state.settings.audit.rollback == "agreed"
        again = "the step is done again" if step == event.step else f"what was saved after step {step} is not used"
        told = f"{evidence}; {again}. {_suspect(transition.state, trusted, back)}"
        if trusted is not None and back:
            # What is done from here on is as suspect, until an audit agrees.
            step = trusted.step
            transition.set_trouble(agreed_step=step)
        _remember(transition, Anomaly(event.generation, step, evidence, undone=True))
        _forget_what_lies_behind(transition, step)
        nodes = sorted({node for worker in suspects if (node := state.fleet.node_of(worker)) is not None})
        undone = [event.generation, step]
        transition.say(told, kind="audit", suspects=suspects, nodes=nodes, decided=event.decided, undone=undone)
        for node in nodes if event.decided else ():
            _count_against(transition, node)
    fail_generation(transition, "audit", evidence, event.step)


def step_skipped(transition: Transition, event: StepSkipped) -> None:
    """The members left the weights unchanged and continued. Bounded: a diverged model would skip forever."""
    known = ((a.generation, a.step, a.undone) for a in transition.trouble.anomalies)
    if (event.generation, event.step - 1, False) in known:
        # Reported again after a restart of the controller.
        return
    _remember(transition, Anomaly(event.generation, event.step - 1, f"step {event.step}: {event.what}", undone=False))
    transition.say(
        f"step {event.step} was not applied: {event.what}; {_samples(event.positions)} are skipped", "anomaly"
    )
    transition.set(furthest_step=max(transition.state.furthest_step, event.step))
    reason = anomaly_budget_spent(transition.state)
    if reason is not None:
        fail_generation(transition, "anomaly", reason, event.step)


def _remember(transition: Transition, anomaly: Anomaly) -> None:
    transition.set_trouble(anomalies=(*transition.trouble.anomalies[-_KEPT + 1 :], anomaly))


def _leave_out(transition: Transition, event: AnomalyFound, evidence: str) -> None:
    skips = union((*transition.trouble.skips, *event.positions))
    transition.set_trouble(skips=skips)
    transition.say(
        f"{evidence}; {_samples(event.positions)} are skipped, step {event.step + 1} is done with the next ones",
        kind="anomaly",
        skipped=[list(range_) for range_ in event.positions],
    )


def _forget_what_lies_behind(transition: Transition, step: int) -> None:
    """Usually nothing: the members do not save a non-finite step."""
    kept = tuple(known for known in transition.saved.checkpoints if known.step <= step)
    if len(kept) < len(transition.saved.checkpoints):
        transition.set_saved(checkpoints=kept)


def _trusted(state: RunState) -> KnownCheckpoint | None:
    """The newest checkpoint from before the last audit in which all ranks agreed."""
    agreed = state.trouble.agreed_step
    before = (known for known in state.saved.checkpoints if agreed is not None and known.step <= agreed)
    return max(before, key=lambda known: known.step, default=None)


def _suspect(state: RunState, trusted: KnownCheckpoint | None, back: bool) -> str:
    """Which steps may have been computed wrongly before, and what is done about it."""
    if state.trouble.agreed_step is None:
        return "Steps since the last one whose record says `audit: agreed` are suspect"
    said = f"Steps since the audit of step {state.trouble.agreed_step} are suspect"
    if trusted is None:
        return f"{said}: no checkpoint is older"
    return f"{said}: {'the run goes back to' if back else 'older is'} checkpoint {trusted.id} (step {trusted.step})"


def _count_against(transition: Transition, node: str) -> None:
    """An audit has named a rank on `node`. After `strikes` of them the next generation begins without its slots, which
    are kept until that trains: it may need what is in the node's memory."""
    fleet, settings = transition.fleet, transition.state.settings
    count = transition.trouble.miscomputed.get(node, 0) + 1
    transition.set_trouble(miscomputed={**transition.trouble.miscomputed, node: count})
    if count < settings.audit.strikes:
        return
    staying = (worker for worker in fleet.workers.values() if worker.slot not in fleet.evicted)
    told = f"{plural(count, 'audit')} {'has' if count == 1 else 'have'} named it"
    left = sum(fleet.node_of(worker.id) != node for worker in staying)
    if left < settings.scaling.min_workers:
        low = settings.scaling.min_workers
        transition.say(f"node {node[:8]} is kept, although {told}: {left} of {low} would be left")
        return
    slots = tuple(slot for slot in fleet.slots.on(node) if slot not in fleet.evicted)
    transition.set_fleet(evicted=(*fleet.evicted, *slots))
    transition.say(f"node {node[:8]} is left: {told}", kind="audit", nodes=[node])


def _samples(ranges: tuple[Range, ...]) -> str:
    return "samples " + ", ".join(f"{start} to {stop - 1}" for start, stop in ranges)
