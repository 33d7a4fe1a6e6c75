"""Saves that the training function asks for, on ranks that count steps from different beginnings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.core.generation_spec import GenerationSpec
from elastic.training.local import SilentCoordinator
from elastic.training.saving.requests import SaveRequests
from elastic.training.scope import GenerationScope
from elastic.training.user.state import State


class Exchange:
    """In the place of the snapshots of two ranks: what they ask, and when they hear of it."""

    def __init__(self, told_every: int) -> None:
        self.asks = False
        self.at_once: list[bool] = []
        self._told_every, self._step = told_every, 0

    def asked_for(self, at_once: bool) -> bool:
        self._step += 1
        self.at_once.append(at_once)
        return self.asks and (at_once or self._step % self._told_every == 0)


def _ranks(generation: int, told_every: int = 1, apart: bool = False) -> tuple[list[SaveRequests], Exchange, State]:
    exchange: Any = Exchange(told_every)
    made, user = [], State()
    for rank in (0, 1):
        spec = GenerationSpec("run", generation, rank, 2)
        scope = GenerationScope(spec, SilentCoordinator(), torch.device("cpu"))
        made.append(SaveRequests(scope, user, exchange, apart))
    return made, exchange, user


@pytest.mark.parametrize(("generation", "apart"), [(1, False), (3, True)])
def test_functions_that_have_begun_together_ask_together(generation: int, apart: bool) -> None:
    ranks, exchange, user = _ranks(generation, apart=apart)
    assert [rank.due() for rank in ranks] == [False, False]
    for rank in ranks:
        rank.ask()
    assert [rank.due() for rank in ranks] == [True, True]
    assert user.saves, "the run's state tells workers that join"
    for rank in ranks:
        rank.made()
    assert [rank.due() for rank in ranks] == [False, False]
    assert exchange.at_once == []


def test_the_request_of_rank_0_is_the_runs(caplog: pytest.LogCaptureFixture) -> None:
    (first, second), exchange, user = _ranks(2, told_every=3)
    second.ask()
    for rank in (second, first):
        rank.announce()
    assert not exchange.asks
    first.ask()
    dues = []
    for step in range(1, 5):
        first._scope.step = step
        first.announce()
        dues.append(first.due())
        if dues[-1]:
            break
    assert dues == [False, False, True], "with the third, a snapshot"
    first.made()
    assert "was called after step 0, for the first time, and step 3 is saved" in caplog.text
    assert user.saves
    first.announce()
    assert not first.due()
    assert exchange.at_once == [False, False, False, True]
