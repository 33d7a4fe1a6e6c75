"""The assignment problem: the best sum, by trying all, and by a proof where there are too many to try."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.sharding import matching
from elastic.core.sharding.matching import _Matching, best_matching

Gains = list[dict[int, int]]
SMALL = st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 6), max_size=5), max_size=5)


def total(gains: Gains, columns: Sequence[int | None]) -> int:
    """Their sum, of columns none of which is given twice."""
    taken = [column for column in columns if column is not None]
    assert len(set(taken)) == len(taken)
    return sum(row[column] for row, column in zip(gains, columns, strict=True) if column is not None)


@given(SMALL)
def test_no_other_assignment_gains_more(gains: Gains) -> None:
    best = max(
        sum(row.get(column, 0) for row, column in zip(gains, order, strict=False)) for order in permutations(range(5))
    )
    assert total(gains, best_matching(gains)) == best


@given(st.integers(0, 10_000))
def test_prices_prove_the_sum_of_a_large_one(seed: int) -> None:
    """By duality: no assignment gains more than all profits and prices together, and this one gains as much."""
    rng = random.Random(seed)
    gains = [{rng.randrange(60): rng.randint(1, 9) for _ in range(rng.randint(0, 6))} for _ in range(70)]
    made = _Matching(gains)
    for row in range(len(gains)):
        made.add(row)
    for row, columns in enumerate(gains):
        assert all(gain <= made._profit[row] + made._price.get(column, 0) for column, gain in columns.items())
    assert min(made._profit, default=0) >= 0
    assert min(made._price.values(), default=0) >= 0
    assert total(gains, made.column) == sum(made._profit) + sum(made._price.values())


@given(SMALL)
def test_when_there_is_no_time_left_it_is_half_of_the_best_at_least(gains: Gains) -> None:
    """A row that comes too late loses at most what the one gains that was there before it."""
    with pytest.MonkeyPatch.context() as patch:
        best = total(gains, best_matching(gains))
        patch.setattr(matching, "_LEAST_STEPS", -1)
        patch.setattr(matching, "_STEPS_PER_ROW", -1)
        quick = best_matching(gains)
    in_turn: list[int | None] = []
    for row in gains:
        free = [column for column in row if column not in in_turn]
        in_turn.append(min(free, key=lambda column: (-row[column], column), default=None))
    assert quick == in_turn
    assert total(gains, quick) <= best
