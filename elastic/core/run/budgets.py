"""Budgets: how often in a row something may fail, how long to pause after it, and how many anomalies are tolerated.

A budget counts a streak: progress (a new furthest step or a new checkpoint) resets it.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.run.phase import Ending
from elastic.core.run.state import RunState, Streaks
from elastic.core.run.transition import Transition

# Each has a bound of its own: a budget, or how many meshes there are.
_BOUNDED = ("anomaly", "audit", "mesh-refused")


def count_failure(transition: Transition, phase: Ending) -> None:
    """Spend the budgets: a streak grows unless the run got further than at the failure before."""
    state, kind = transition.state, phase.kind
    newest = state.saved.newest_checkpoint
    reached = (state.furthest_step, newest.step if newest else -1)
    streaks = state.trouble.streaks
    progressed = reached[0] > streaks.mark[0] or reached[1] > streaks.mark[1]
    if progressed:
        streaks = Streaks(slot_failures=streaks.slot_failures)
    # Passing over a bad checkpoint is bounded by the number of checkpoints and is not a crash.
    passed_over = state.base is not None and state.base.id in state.saved.rejected
    node_lost = kind in ("node-lost", "node-frozen")
    transition.set_trouble(
        streaks=replace(
            streaks,
            crashes=streaks.crashes + (not passed_over and not node_lost and kind not in _BOUNDED),
            node_losses=streaks.node_losses + node_lost,
            user_errors=streaks.user_errors + (kind == "user-error"),
            in_place=streaks.in_place + 1 if not phase.lost and kind in ("collective-failed", "hang") else 0,
            # Never lowered: a checkpoint that is written again because the one before was bad is no progress.
            mark=(max(reached[0], streaks.mark[0]), max(reached[1], streaks.mark[1])),
        )
    )


def most_node_losses(state: RunState) -> int:
    """Nodes fail in bursts (a rack, a switch) that say nothing about the job, so each of them may fail once more than
    the budget for crashes; a job that kills every node it gets still ends."""
    return state.settings.failures.crash_streak + state.settings.scaling.max_slots


def anomaly_budget_spent(state: RunState) -> str | None:
    """Why the run ends with the anomaly that was found in this generation; None where it can continue."""
    last = state.trouble.anomalies[-1] if state.trouble.anomalies else None
    if last is None or last.generation != state.generation:
        return None
    settings = state.settings.anomalies
    if settings.policy == "stop":
        return f"{last.evidence}; the policy is to stop"
    recent = sum(a.step > last.step - settings.window_steps for a in state.trouble.anomalies)
    if recent > settings.max_anomalies:
        return (
            f"{recent} anomalies within {settings.window_steps} steps (at most {settings.max_anomalies} are "
            f"tolerated); the last one: {last.evidence}"
        )
    return None


def hold_back_slots(transition: Transition) -> None:
    """A slot was no good: pause before the next request, so that one bad node cannot keep the run busy."""
    failed = transition.trouble.streaks.slot_failures + 1
    transition.set_trouble(streaks=replace(transition.trouble.streaks, slot_failures=failed))
    transition.set_fleet(slots_not_before=transition.now + _pause_s(transition.state, failed))


def backoff_s(state: RunState) -> float:
    """No pause after a first failure. The growing ones let a burst of losses pass in a few generations."""
    return _pause_s(state, state.trouble.streaks.crashes + state.trouble.streaks.node_losses - 1)


def _pause_s(state: RunState, failed: int) -> float:
    """base * 2**(n - 1) up to the limit, for the n-th failure in a row."""
    failures = state.settings.failures
    if failed < 1:
        return 0.0
    return float(min(failures.retry_backoff_s * 2.0 ** min(failed - 1, 30), failures.retry_backoff_limit_s))
