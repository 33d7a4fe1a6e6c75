"""Registered objects whose state differs between ranks are named, on every rank alike."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.errors import UsageError
from elastic.training.user.comparison import Comparison
from elastic.training.user.state import State

RANKS = 3


class Agreement:
    """The real one's answers, between threads."""

    def __init__(self, rank: int, shared: dict[int, Sequence[int]], barrier: threading.Barrier) -> None:
        self.rank, self._shared, self._barrier = rank, shared, barrier

    def least(self, values: Sequence[int]) -> list[int]:
        return [min(column) for column in zip(*self._exchanged(values), strict=True)]

    def any_and_unequal(self, flags: Sequence[bool], values: Sequence[int]) -> tuple[list[bool], list[bool]]:
        return list(flags), [len(set(column)) > 1 for column in zip(*self._exchanged(values), strict=True)]

    def _exchanged(self, values: Sequence[int]) -> list[Sequence[int]]:
        self._shared[self.rank] = values
        self._barrier.wait(30.0)
        found = [self._shared[rank] for rank in range(RANKS)]
        self._barrier.wait(30.0)
        return found


def compared(states: list[State], times: int = 1) -> list[Exception | None]:
    shared: dict[int, Sequence[int]] = {}
    barrier = threading.Barrier(RANKS)

    def one(rank: int) -> Exception | None:
        scope: Any = SimpleNamespace(spec=SimpleNamespace(rank=rank, world_size=RANKS), check=lambda: None)
        agreement: Any = Agreement(rank, shared, barrier)
        compare = Comparison(scope, states[rank], agreement)
        try:
            for _ in range(times):
                compare()
        except UsageError as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def registered(**seeds: Sequence[int]) -> list[State]:
    """A generator per name, seeded differently by rank."""
    states = [State() for _ in range(RANKS)]
    for rank, state in enumerate(states):
        state.register(**{name: torch.Generator().manual_seed(by_rank[rank]) for name, by_rank in seeds.items()})
    return states


def test_differing_states_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert compared(registered(same=[1, 1, 1], rng=[1, 1, 2]), times=2) == [None] * RANKS
    assert [record.getMessage() for record in caplog.records] == [
        "the ranks' states of 'rng' differ; rank 0's is saved, and every rank gets it after a recovery"
    ]


def test_equal_states_need_no_word(caplog: pytest.LogCaptureFixture) -> None:
    assert compared(registered(a=[4, 4, 4])) == [None] * RANKS
    assert compared([State() for _ in range(RANKS)]) == [None] * RANKS
    assert not caplog.records


def test_ranks_that_register_different_objects_are_refused_on_every_rank() -> None:
    states = registered(a=[1, 1, 1])
    states[0].register(b=torch.Generator())
    errors = compared(states)
    assert [type(error) for error in errors] == [UsageError] * RANKS
    assert "rank 0 has registered a, b with elastic.state, and another rank other objects" in str(errors[0])
