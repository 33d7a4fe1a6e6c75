"""What an optimizer counts in its groups, where one update is several steps on some ranks and none on others: it goes
on as by one step. The trial has shown that the counts do not depend on tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elastic.engines.fsdp2.update.stand_ins import StandIn, standing_in
from elastic.engines.fsdp2.update.trial import Trial
from elastic.engines.optimizer.numbers import Key, numbers_of, set_numbers


class Counts:
    """1. `once` around an update; 2. `of` around each of its steps. Both do nothing where it `counts` in nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer, trial: Trial) -> None:
        self._optimizer, self._counts, self._toys = optimizer, trial.counts, trial.toys
        self._before: dict[Key, Any] = {}
        self._after: dict[int, dict[Key, Any]] = {}

    @contextmanager
    def once(self) -> Iterator[None]:
        if not self._counts:
            yield
            return
        self._before, self._after = numbers_of(self._optimizer), {}
        yield
        for group in sorted(self._toys.keys() - self._after.keys()):
            # This rank owns none of its tensors.
            toy = {group: [_copied(self._toys[group])]}
            with torch.random.fork_rng(devices=[]), self.of(toy), standing_in(self._optimizer, toy):
                self._optimizer.step()
        for found in self._after.values():
            set_numbers(self._optimizer.param_groups, found)

    @contextmanager
    def of(self, by_group: Mapping[int, Collection[Any]]) -> Iterator[None]:
        """A step of these groups alone, by what it steps of each."""
        if not self._counts:
            yield
            return
        set_numbers(self._optimizer.param_groups, self._before)
        yield
        after = numbers_of(self._optimizer)
        for group in (group for group, found in by_group.items() if found):
            self._after[group] = {key: value for key, value in after.items() if key[0] == group}


def _copied(toy: StandIn) -> StandIn:
    """Always the same step: a thousand of them might lead anywhere."""
    made = StandIn(toy.tensor.detach().clone(), copy.deepcopy(toy.state))
    made.tensor.grad = toy.tensor.grad
    return made
