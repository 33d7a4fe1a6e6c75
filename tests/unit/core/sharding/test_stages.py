"""Where layers are cut into stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import UsageError
from elastic.core.sharding.stages import balanced


def _largest(costs: list[int], begins: tuple[int, ...]) -> int:
    return max(sum(costs[a:b]) for a, b in zip(begins, (*begins[1:], len(costs)), strict=True))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8), st.integers(1, 4))
def test_it_is_the_best_of_all_cuts_whose_stages_have_trained_layers(row: list[tuple[int, bool]], stages: int) -> None:
    costs, trained = [cost for cost, _ in row], [is_trained for _, is_trained in row]
    cuts = [(0, *rest) for rest in combinations(range(1, len(row)), stages - 1)]
    allowed = [cut for cut in cuts if all(any(trained[a:b]) for a, b in zip(cut, (*cut[1:], len(row)), strict=True))]
    if not allowed:
        with pytest.raises(UsageError, match="layers with trained parameters"):
            balanced(costs, trained, stages)
        return
    found = balanced(costs, trained, stages)
    assert found in allowed
    assert _largest(costs, found) == min(_largest(costs, cut) for cut in allowed)


def test_an_embedding_and_a_head_are_weighed_as_what_they_have() -> None:
    assert balanced([8, 0, 4, 4, 4, 4, 0, 8], [True, False, *[True] * 4, True, True], 4) == (0, 1, 4, 6)
