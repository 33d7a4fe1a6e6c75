"""Where in the run a saved state stands: its step, the order in which positions count samples, and what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.data.steps import Range, union
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.generation_spec import BatchSettings


def told(plan: StepPlan, seed: int, step: int) -> dict[str, Any]:
    """What is saved with every state after `step` steps, in JSON form."""
    return {
        "step": step,
        "position": plan.position(step),
        "skips": [list(range_) for range_ in plan.skips],
        "data": _order(plan, seed),
    }


def check(saved: Mapping[str, Any], plan: StepPlan, seed: int) -> None:
    """Raises UsageError where the saved state counts samples in another order than this run."""
    for name, value in _order(plan, seed).items():
        if saved["data"].get(name) != value:
            raise UsageError(
                f"the checkpoint was made with {name} {saved['data'].get(name)}, this run has {value}: it cannot go on "
                f"with the same samples; set {name} back, or start a new run"
            )


def resumed(saved: Mapping[str, Any], plan: StepPlan, batch: BatchSettings) -> StepPlan:
    """The plan with what the state before has left out, too: the controller of another attempt may not know of it.

    Raises IntegrityError for a state that was trained on samples that are left out since then.
    """
    position = int(saved["position"])
    before = _until(position, ((start, stop) for start, stop in saved.get("skips", ())))
    for start, stop in _until(position, plan.skips):
        if not any(a <= start and stop <= b for a, b in before):
            raise IntegrityError(
                f"the state after step {saved['step']} was trained on samples {start} to {stop - 1}, which were found "
                "to be no good since then"
            )
    return skipping(plan, union((*plan.skips, *before)), batch)


def skipping(plan: StepPlan, skips: tuple[Range, ...], batch: BatchSettings) -> StepPlan:
    """The plan of the same run without these positions."""
    total = total_samples(plan.dataset_size, plan.global_batch, batch.max_steps, batch.epochs, skips)
    return replace(plan, skips=skips, total_samples=total)


def _order(plan: StepPlan, seed: int) -> dict[str, int]:
    """What defines the order in which positions count samples, and the random streams."""
    return {
        "seed": seed,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "dataset_size": plan.dataset_size,
    }


def _until(position: int, ranges: Iterable[Range]) -> tuple[Range, ...]:
    return union((start, min(stop, position)) for start, stop in ranges if start < position)
