from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.audits import MOST_ROUNDING
from elastic.core.data.update_audits import (
    Recomputed,
    judge_updates,
    of_the_script,
    update_tolerance,
)

NOTHING = math.nan


def statements(world: int, apart: dict[tuple[int, int], float]) -> dict[int, list[Recomputed]]:
    """By rank: what it, its right neighbour and the next one say; `apart[rank, about]`, else 0."""
    others = range(min(world, 3))
    return {
        rank: [Recomputed((rank + d) % world, apart.get(((rank + d) % world, rank), 0.0)) for d in others]
        for rank in range(world)
    }


@given(world=st.integers(3, 12), wrong=st.integers(0, 11), itself=st.booleans(), tolerance=st.sampled_from([0.0, 1e-6]))
def test_a_rank_that_updates_wrongly_is_named(world: int, wrong: int, itself: bool, tolerance: float) -> None:
    """By both that computed its update again; it disputes theirs, where its arithmetic is wrong always."""
    wrong %= world
    found = {((wrong + d) % world, wrong): 0.1 for d in (1, 2)}
    if itself:
        # Its memory has changed in the step, not its arithmetic.
        found[wrong, wrong] = 0.1
    else:
        found |= {(wrong, (wrong - d) % world): 0.1 for d in (1, 2)}
    verdict = judge_updates(statements(world, found), tolerance)
    assert (verdict.wrong, verdict.undecided) == ((wrong,), ())
    assert f"the update of rank {wrong} differs by 0.1" in verdict.evidence


@given(world=st.integers(2, 12), rounding=st.floats(0.0, 1e-7))
def test_agreement_is_no_alarm(world: int, rounding: float) -> None:
    found = {(rank, about): rounding for rank in range(world) for about in range(world)}
    assert judge_updates(statements(world, found), 1e-7).evidence == ""


def test_of_two_ranks_only_one_that_contradicts_itself_is_named() -> None:
    verdict = judge_updates(statements(2, {(1, 0): 0.5}), 0.0)
    assert (verdict.wrong, verdict.undecided) == ((), (0, 1))
    assert judge_updates(statements(2, {(1, 0): 0.5, (0, 0): 0.5}), 0.0).wrong == (0,)
    assert judge_updates(statements(2, {(0, 0): 0.5}), 0.0).wrong == (0,)


def test_a_rank_that_says_nothing_is_no_witness() -> None:
    """Of another kind of device, or without weights."""
    found = {(1, 0): 0.5, (2, 0): NOTHING}
    assert judge_updates(statements(3, found), 0.0).undecided == (0, 1)


def tolerance(*own: float, before: float = 0.0) -> float | None:
    return update_tolerance([Recomputed(rank, apart) for rank, apart in enumerate(own)], before)


def test_a_faulty_rank_does_not_make_the_others_tolerant() -> None:
    assert tolerance(0.0, 0.0, 0.0) == 0.0
    assert tolerance(0.0, 1e-2, 1e-8) == pytest.approx(32e-8)
    assert tolerance(0.0, 0.5) == 0.0
    assert tolerance(1e-7, 2e-7, before=1e-5) == 1e-5
    assert tolerance(1e-4, 1e-4) == MOST_ROUNDING
    assert tolerance(NOTHING, 1e-7) == 0.0


def test_an_optimizer_that_most_ranks_cannot_repeat_is_not_compared() -> None:
    assert tolerance(1.0, 0.0, 0.0) == 0.0
    assert tolerance(1.0, math.inf, 0.0) is None
    assert tolerance(2 * MOST_ROUNDING, 2 * MOST_ROUNDING) is None
    assert tolerance(NOTHING, NOTHING, 0.0) == 0.0


def test_what_most_ranks_change_is_the_scripts() -> None:
    assert [of_the_script([True] * changed + [False] * (4 - changed)) for changed in (1, 2, 3, 4)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert of_the_script([True, True])
    assert not of_the_script([True, False])
