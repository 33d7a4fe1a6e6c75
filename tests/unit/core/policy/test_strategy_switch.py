"""Strategies that change while links do: what was chosen against the best choice in hindsight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.hops import BACKEND, NODE, NODES, RANKS, Hop, Islands, exact_costs
from elastic.core.policy.strategy_switch import (
    WINDOW,
    Choice,
    Looks,
    after_look,
    first_choice,
    is_faster,
    judged,
)

_ISLANDS = Islands.of([0, 1] * 4)
_SIZES = [25_000_000] * 8
STEPS = 6000


def _links(fast: float, slow: float, backend: float) -> dict[str, Hop]:
    """`fast`, `slow`: seconds per byte within a node and between nodes, where four lanes share the link."""
    return {
        NODE: Hop(1e-5, fast), NODES: Hop(5e-5, 4 * slow), RANKS: Hop(5e-5, slow), BACKEND: Hop(1e-4, backend),
    }  # fmt: skip


# Of ranks that are not neighbours: every message of a ring crosses.
_TOPOLOGIES = {
    "one switch": _links(1e-10, 1e-10, 1.5e-10),
    "slow between nodes": _links(1e-10, 8e-9, 2e-8),
    "the backend knows better": _links(1e-10, 8e-9, 4e-9),
    "slow within nodes": _links(4e-9, 4e-10, 2e-9),
}


def _run(
    phases: Sequence[dict[str, float]],
    changes: Sequence[int],
    chance: random.Random,
    every: int,
    look: int,
    wrong: float,
) -> float:
    """The regret of a run whose links change before the steps `changes`: seconds as chosen over those of brute force,
    less one. A look costs as much as `look` steps of the fastest strategy; a measurement is up to `wrong` off."""
    spent, best, looks, choice = 0.0, 0.0, Looks(every), Choice("ring", 0)
    window: list[float] = []

    def look_at(costs: dict[str, float]) -> tuple[dict[str, float], float]:
        found = {name: seconds * chance.uniform(1 - wrong, 1 + wrong) for name, seconds in costs.items()}
        return found, look * min(costs.values())

    for step in range(STEPS):
        costs = phases[sum(step >= change for change in changes)]
        drifted = False
        if looks.window_ends(step):
            looks, drifted = looks.drifted(step, median(window))
            window.clear()
        if drifted or step >= looks.next:
            found, spent_s = look_at(costs)
            if looks.last is not None and (drifted or is_faster(choice, found)):
                again, more_s = look_at(costs)
                found, spent_s = {name: (found[name] + again[name]) / 2 for name in found}, spent_s + more_s
            choice, looks = after_look(choice, looks, found, step, 0.0, drifted)
            spent += spent_s
            window.clear()
        window.append(costs[choice.strategy] * chance.uniform(1 - wrong, 1 + wrong))
        spent += costs[choice.strategy]
        best += min(costs.values())
    return spent / best - 1


def _phases(chance: random.Random) -> list[dict[str, float]]:
    return [exact_costs(_ISLANDS, _SIZES, _TOPOLOGIES[name]) for name in chance.sample(sorted(_TOPOLOGIES), 3)]


@pytest.mark.parametrize("seed", range(20))
def test_the_regret_is_small_where_links_change_in_mid_run(seed: int) -> None:
    chance = random.Random(seed)
    assert _run(_phases(chance), (STEPS // 3, STEPS // 3 * 2), chance, every=50, look=0, wrong=0.05) <= 0.05


def test_the_regret_is_small_with_all_that_looks_cost_and_get_wrong() -> None:
    """With the defaults, and changes at any time. What the strategy in use does not feel is found late."""
    found = []
    for seed in range(100):
        chance = random.Random(seed)
        changes = sorted(chance.sample(range(500, STEPS - 500), 2))
        found.append(_run(_phases(chance), changes, chance, every=200, look=6, wrong=0.15))
    found.sort()
    assert median(found) <= 0.05
    assert found[90] <= 0.1


def test_exchanges_that_take_another_time_are_looked_at_and_then_usual() -> None:
    looks = Looks(100).looked(2, True, False)
    assert [step for step in range(40) if looks.window_ends(step)] == [12, 22, 32]

    def after(looks: Looks, *windows: float) -> tuple[Looks, list[bool]]:
        assert looks.last is not None
        told = []
        for number, seconds in enumerate(windows, start=1):
            looks, drifted = looks.drifted(looks.last + number * WINDOW, seconds)
            told.append(drifted)
        return looks, told

    assert after(looks, 1.0, 1.1, 0.9, 1.2, 0.8, 1.2, 1.1, 1.2)[1] == [False] * 8, "two in a row, and both alike"
    assert after(looks, 1.0, 1.2, 1.2, 1.2)[1] == [False, False, True, True]
    assert after(looks, 1.0, 1.0, 0.8, 0.8)[1] == [False, False, False, True]
    later, told = after(replace(looks, misses=1), *[1.0] + [1.2] * 5)
    assert told == [False] * 4 + [True, True], "half of `every` after a look, where one has found nothing"
    assert later.looked(60, False, False).usual_s == 1.0
    assert after(later.looked(60, False, True), 1.2, 1.2, 1.2, 1.2)[1] == [False] * 4, "it is usual now"


def test_a_drift_in_which_nothing_is_found_is_looked_at_once_more_soon() -> None:
    looks, seen = Looks(100).looked(2, True, False), []
    for drifted in (True, False, False, True, False):
        looks = looks.looked(looks.next, False, drifted)
        seen.append((looks.next, looks.misses))
    assert seen == [(127, 1), (227, 1), (427, 1), (627, 2), (827, 2)]
    assert looks.looked(827, True, True).misses == 0


def test_pauses_between_looks_double_while_nothing_is_found() -> None:
    looks, seen = Looks(100), []
    while looks.next < 1400:
        seen.append(looks.next)
        looks = looks.looked(looks.next, looks.next in (2, 702), False)
    assert seen == [2, 102, 302, 502, 702, 802, 1002, 1202]
    assert Looks(1).next == 0
    assert Looks(2).next == 1


def test_no_single_strategy_would_do() -> None:
    """Each one alone is far above the best choice on the same links, so that the limit above says something."""
    tables = [exact_costs(_ISLANDS, _SIZES, hops) for hops in _TOPOLOGIES.values()]
    best = sum(min(costs.values()) for costs in tables)
    assert all(sum(costs[name] for costs in tables) > 1.2 * best for name in tables[0])


def test_topologies_have_different_winners() -> None:
    best = {}
    for name, hops in _TOPOLOGIES.items():
        costs = exact_costs(_ISLANDS, _SIZES, hops)
        best[name] = min(costs, key=lambda strategy: costs[strategy])
    assert len(set(best.values())) >= 3, best


def test_nothing_is_switched_for_less_than_a_switch_costs() -> None:
    choice = Choice("ring", 0)
    for number in range(1, 100):
        choice = judged(choice, {"ring": 1.001, "tree": 1.0}, number * 10, 10, 10.0, 0)
    assert choice.strategy == "ring"
    assert choice.regret_s["tree"] == pytest.approx(0.99)


def test_what_lasts_is_switched_to_and_what_does_not_is_not() -> None:
    slow, fast = {"ring": 2.0, "tree": 1.0}, {"ring": 1.0, "tree": 2.0}
    choice = judged(Choice("ring", 0), slow, 10, 10, 8.0, 0)
    assert choice.strategy == "ring"
    assert judged(choice, slow, 20, 10, 8.0, 0) == Choice("tree", 20)
    # It was a moment: what was lost in it is won back.
    again = judged(judged(choice, fast, 20, 10, 8.0, 0), slow, 30, 10, 8.0, 0)
    assert again.strategy == "ring"


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10), min_size=3, max_size=3), min_size=1),
    st.integers(1, 7),
)
def test_never_twice_within_an_incident(tables: list[dict[str, float]], quiet: int) -> None:
    choice, switches = first_choice(tables[0], 0), [0]
    for step, costs in enumerate(tables, start=1):
        before = choice.strategy
        choice = judged(choice, costs, step, 1, 0.0, quiet)
        if choice.strategy != before:
            switches.append(step)
    assert all(later - earlier >= quiet for earlier, later in pairwise(switches))
