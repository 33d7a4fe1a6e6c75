"""A step that lost a rank within its gradient accumulation: what is kept of it, and what is dealt again.

Each survivor holds the sum of the gradients of its finished micro-batches. Those of the lost rank, and of a survivor
whose sum is not whole, are dealt again to the ranks of the next generation. The gradient stays the mean over the global
batch: every micro-batch is in one sum, once. (ReCoVer, arXiv 2605.11215, does so for replicas.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rest:
    """The micro-batches of `step`, by index and ascending, whose gradients no rank holds."""

    step: int
    indices: tuple[int, ...]


def rest_of(step: int, holders: Sequence[int], world_size: int) -> Rest | None:
    """What is left of a step. `holders[index]` is how many ranks hold the gradient of that micro-batch.

    None where the whole step is to be dealt: nothing is held, no pass is saved at this world size, or two ranks claim
    the same micro-batch, which would count twice.
    """
    left = tuple(index for index, held in enumerate(holders) if held == 0)
    if max(holders, default=0) > 1 or _passes(len(left), world_size) >= _passes(len(holders), world_size):
        return None
    return Rest(step, left)


def kept_factor(before: int, now: int) -> float:
    """The factor of a sum of gradients that was begun with `before` ranks, where `now` ranks finish the step.

    A micro-batch's gradient g enters the sum as loss_scale(weight, micro_steps, ranks) * g / micro_steps
    = weight * ranks * g, since the engine divides by the micro-steps (`core.data.micro_batches.loss_scale`); the
    reduction then divides by the ranks. So the sum is proportional to the ranks, and nothing else of it depends on the
    world size: neither the number of passes nor how many of them are left.
    """
    return now / before


def _passes(micro_batches: int, world_size: int) -> int:
    """Of each rank; without any micro-batch one padding pass, whose backward reduces what is held."""
    return max(1, -(-micro_batches // world_size))
