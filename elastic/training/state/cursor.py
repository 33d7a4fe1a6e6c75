"""What the next step will read and draw, put together over all ranks: it must not depend on how many there are."""

from __future__ import annotations

from dataclasses import replace

from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan
from elastic.training import rng

_MODULUS = 1 << 64


def next_step(plan: StepPlan, order: SampleOrder, step: int) -> int:
    """Samples, weights and random streams of this rank's passes in `step` as one number below 2**64.

    Summed over the ranks modulo 2**64 it is the same at every world size: see `whole_step`. 0 after the last step.
    """
    if step >= plan.last_step:
        return 0
    passes = [batch for batch in plan.deal(step) if batch.weight > 0.0]
    total = 0
    for batch in passes:
        samples = ",".join(map(str, order.indices(batch.start, batch.stop)))
        stream = rng.derive(*rng.forward_stream(order.seed, step, batch.index, 0))
        total += rng.derive(batch.index, batch.start, batch.stop, batch.weight.hex(), samples, stream)
    return total % _MODULUS


def whole_step(plan: StepPlan, order: SampleOrder, step: int) -> int:
    """The same for all passes of the step, as a single rank would have it."""
    return next_step(replace(plan, world_size=1, rank=0), order, step)
