"""What a Trainer that trains on its own model's completions does beside the loop: ranks apart, and figures together.

A micro-batch is some prompts with all completions of each. It is sampled, scored and compared by itself, as by a
process that trains alone, from a random stream of its own: the same completions at every number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

# Name -> values, as TRL's Trainers keep what they log since the last line.
Figures = defaultdict[str, list[float]]


@contextmanager
def alone() -> Iterator[None]:
    """accelerate takes this process for one that trains alone: nothing is gathered, and nothing added up."""
    of_one = {"distributed_type": DistributedType.NO, "num_processes": 1, "process_index": 0}
    shared = [known for known in (PartialState._shared_state, AcceleratorState._shared_state) if known]
    before = [{name: known[name] for name in of_one} for known in shared]
    for known in shared:
        known.update(of_one)
    try:
        yield
    finally:
        for known, own in zip(shared, before, strict=True):
            known.update(own)


@contextmanager
def counted_as(dataset: Any, times: int) -> Iterator[float]:
    """accelerate counts each prompt of an evaluation `times`, as often as it is evaluated; by that it knows which of
    the last batch are there to fill it up. Gives how many it counts; infinite where the dataset has no length."""
    if not hasattr(dataset, "__len__"):
        yield math.inf
        return
    dataset.total_dataset_length = len(dataset) * times
    try:
        yield dataset.total_dataset_length
    finally:
        del dataset.total_dataset_length


@dataclass(frozen=True)
class Counts:
    """Tokens of a step: of its completions as far as the loss counts them, and all, prompts included."""

    items: float
    all: float

    def over_ranks(self, kept: Counts | None, device: torch.device) -> Counts:
        """Of all ranks, of which this one has `self` in micro-batches at hand. `kept`: those of the whole step, where
        this rank holds gradients of it from before a failure: then others' are not at hand any more. Collective."""
        known = (0.0, 0.0, 0.0) if kept is None else (kept.items, kept.all, 1.0)
        total = torch.tensor([self.items, self.all, *known], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total)
        items, tokens, known_items, known_tokens, ranks = total.tolist()
        return Counts(known_items / ranks, known_tokens / ranks) if ranks else Counts(items, tokens)


def copied(figures: Mapping[str, Sequence[float]]) -> Figures:
    return defaultdict(list, {name: list(values) for name, values in figures.items()})


def later(figures: Mapping[str, Sequence[float]], before: Mapping[str, Sequence[float]]) -> Figures:
    """What was added to those of `before`."""
    added = {name: values[len(before.get(name, ())) :] for name, values in figures.items()}
    return copied({name: values for name, values in added.items() if values})


def one_step(own: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The figures of a step, of all ranks: the mean over its micro-batches, but for what is called a minimum or a
    maximum. Collective."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, {name: list(values) for name, values in own.items()})
    together: Figures = defaultdict(list)
    for of_rank in ranks:
        for name, values in of_rank.items():
            together[name] += values
    return {name: _together(name, values) for name, values in sorted(together.items())}


def _together(name: str, values: Sequence[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        return math.nan
    words = name.rpartition("/")[2].split("_")
    if "min" in words:
        return min(finite)
    return max(finite) if "max" in words else sum(finite) / len(finite)
