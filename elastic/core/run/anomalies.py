"""Handling of steps with a non-finite loss or gradient: the generation ends, and the samples are left out."""

from __future__ import annotations

from elastic.core.data.steps import Range, union
from elastic.core.events import AnomalyFound, StepSkipped
from elastic.core.run.budgets import anomaly_budget_spent
from elastic.core.run.recovery import fail_generation
from elastic.core.run.state import Anomaly
from elastic.core.run.transition import Transition

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


def _samples(ranges: tuple[Range, ...]) -> str:
    return "samples " + ", ".join(f"{start} to {stop - 1}" for start, stop in ranges)
