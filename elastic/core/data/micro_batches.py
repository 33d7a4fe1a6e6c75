"""Which rank computes what in a step: a fixed global batch dealt to any number of ranks.

A step is cut into micro-batches without looking at the world size; only then are they dealt. So the samples of a
step, their cut and their random streams (one per micro-batch) are the same at every world size, and the gradient is
exactly the mean over the step's samples.

Ranges of positions may be skipped (samples that made a step's loss or gradient non-finite): every step from there on
takes the next ones instead. Numbers of steps stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.data.steps import Range
from elastic.core.errors import UsageError


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass over the positions [start, stop) of the global order.

    `index` is the number of the micro-batch within its step. `weight` is its share of the step's samples, 0.0 for a
    padding pass, which repeats positions of the same step only so that all ranks run equally many passes.

    `audits` is the rank whose micro-batch is repeated to be compared (`core.data.audits`); such a pass has no weight
    either, and `audited_weight` is that of the original.
    """

    index: int
    start: int
    stop: int
    weight: float
    audits: int | None = None
    audited_weight: float = 0.0

    @property
    def samples(self) -> int:
        return self.stop - self.start


def steps_in(total_samples: int, global_batch: int) -> int:
    """Number of steps that consume `total_samples`; the last may be short."""
    _positive("global_batch", global_batch)
    return _ceil_div(total_samples, global_batch)


def step_positions(
    step: int,
    global_batch: int,
    total_samples: int | None = None,
    skips: Sequence[Range] = (),
    begun: tuple[int, int] = (0, 0),
) -> Range:
    """The positions [start, stop) that step number `step` (from 0) consumes.

    `total_samples` counts what the run consumes, without what it skips. `skips` are sorted ranges of positions, each of
    them what some steps would have consumed, so that no step is cut in two: ValueError otherwise. `begun`: a step, and
    the samples that were consumed before it, from which on steps have `global_batch`.
    """
    _positive("global_batch", global_batch)
    start = begun[1] + (step - begun[0]) * global_batch
    stop = start + global_batch
    if total_samples is not None:
        stop = min(stop, total_samples)
    if step < begun[0] or stop <= start:
        raise ValueError(f"step {step} has no samples: {total_samples} samples in steps of {global_batch}")
    first = next_position(start, skips)
    if next_position(stop - 1, skips) != first + (stop - 1 - start):
        raise ValueError(f"step {step}, positions from {first}, is cut in two by the skipped ranges {list(skips)}")
    return first, first + stop - start


def next_position(consumed: int, skips: Sequence[Range] = ()) -> int:
    """The position that follows when `consumed` samples were consumed. `skips` as in `step_positions`."""
    position = consumed
    for start, stop in skips:
        if position < start:
            break
        position += stop - start
    return position


def micro_batches_in(samples: int, micro_batch: int) -> int:
    """Micro-batches that a step of `samples` is cut into; the last may be short."""
    _positive("micro_batch", micro_batch)
    return _ceil_div(samples, micro_batch)


def micro_steps_per_rank(samples: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches that every rank runs for a step of `samples`: ceil(micro-batches of the step / world size)."""
    _positive("world_size", world_size)
    return _ceil_div(micro_batches_in(samples, micro_batch), world_size)


def deal(
    step: int, global_batch: int, micro_batch: int, world_size: int, rank: int, total_samples: int | None = None,
    skips: Sequence[Range] = (), only: Sequence[int] | None = None, begun: tuple[int, int] = (0, 0),
) -> tuple[MicroBatch, ...]:  # fmt: skip
    """The micro-batches of one rank in one step, in order; equally many on every rank, and at least one.

    Over all ranks each position of the step comes exactly once with a weight above zero, and the weights sum to one.
    Neighbouring micro-batches go to the same rank, and ranks differ by at most one of them.

    `only`: the indices, ascending, of those that are dealt, with the same weights (see `core.data.unfinished`); where
    it is empty every rank has one padding pass.
    """
    start, stop = step_positions(step, global_batch, total_samples, skips, begun)
    count = micro_batches_in(stop - start, micro_batch)
    _positive("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks")
    dealt = range(count) if only is None else only
    micro_steps = max(1, _ceil_div(len(dealt), world_size))

    def numbered(index: int, weighted: bool = True) -> MicroBatch:
        begin = start + index * micro_batch
        end = min(begin + micro_batch, stop)
        return MicroBatch(index, begin, end, (end - begin) / (stop - start) if weighted else 0.0)

    first, last = rank * len(dealt) // world_size, (rank + 1) * len(dealt) // world_size
    mine = [numbered(index) for index in dealt[first:last]]
    # Real samples are repeated, not zeros fed: a made-up batch could overflow, and 0.0 * inf is not 0.0.
    spare = mine[-1].index if mine else rank % count
    return tuple(mine + [numbered(spare, weighted=False)] * (micro_steps - len(mine)))


def loss_scale(weight: float, micro_steps: int, world_size: int) -> float:
    """The factor of a micro-batch's mean loss before the engine's backward.

    The engine averages over micro-batches and ranks: gradient = sum(scale * g) / (micro_steps * world_size), where g is
    the gradient of the mean loss of one micro-batch. The mean over the global batch is sum(weight * g), hence

        scale = weight * micro_steps * world_size
    """
    return weight * micro_steps * world_size


def refused_noise(
    sp: int, global_batch: int | None, micro_batch: int | None, tp: int = 1, ep: int = 1,
    pp: int = 1,
) -> str | None:  # fmt: skip
    """Why the gradient noise of steps with these batches (None: not known yet) cannot be measured, as a sentence."""
    if sp > 1:
        return f"gradient_noise: with mesh: {{sp: {sp}}} a rank's gradient is that of its part of the sequences only"
    if tp > 1:
        return f"gradient_noise: with mesh: {{tp: {tp}}} a rank's gradient is that of its slices of the layers only"
    if ep > 1:
        return f"gradient_noise: with mesh: {{ep: {ep}}} a rank's experts have gradients of other ranks' samples"
    if pp > 1:
        return f"gradient_noise: with mesh: {{pp: {pp}}} a rank's gradient is that of its layers only"
    if global_batch is not None and micro_batch is not None and micro_batch >= global_batch:
        return (
            f"gradient_noise compares a step with its micro-batches and needs two of them: micro_batch ({micro_batch}) "
            f"must be below global_batch ({global_batch})"
        )
    return None


def _ceil_div(value: int, divisor: int) -> int:
    return (value + divisor - 1) // divisor


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} must be at least 1, got {value}")
