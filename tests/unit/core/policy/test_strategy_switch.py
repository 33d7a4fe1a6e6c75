"""Strategies that change while links do: what was chosen against the best choice in hindsight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.hops import BACKEND, NODE, NODES, RANKS, Hop, Islands, exact_costs
from elastic.core.policy.strategy_switch import Choice, first_choice, judged

_ISLANDS = Islands.of([0, 1] * 4)
_SIZES = [25_000_000] * 8
EVERY, STEPS = 50, 6000


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


def _run(phases: Sequence[dict[str, float]], switch_s: float, chance: random.Random) -> tuple[float, float, list[int]]:
    """Seconds of a run whose links change at each phase, as chosen and by brute force; the steps of the switches."""
    per_phase = STEPS // len(phases)
    spent, best, switches = 0.0, 0.0, []
    choice: Choice | None = None
    for step in range(STEPS):
        costs = phases[step // per_phase]
        if choice is None:
            choice = first_choice(costs, step)
        if step and step % EVERY == 0:
            measured = {name: seconds * chance.uniform(0.95, 1.05) for name, seconds in costs.items()}
            before = choice.strategy
            choice = judged(choice, measured, step, EVERY, switch_s, quiet=2 * EVERY)
            if choice.strategy != before:
                spent += switch_s
                switches.append(step)
        spent += costs[choice.strategy]
        best += min(costs.values())
    # Brute force pays for its switches too.
    changes = sum(
        min(before, key=lambda name: before[name]) != min(after, key=lambda name: after[name])
        for before, after in pairwise(phases)
    )
    return spent, best + changes * switch_s, switches


@pytest.mark.parametrize("seed", range(20))
def test_the_regret_is_small_where_links_change_in_mid_run(seed: int) -> None:
    chance = random.Random(seed)
    phases = [exact_costs(_ISLANDS, _SIZES, _TOPOLOGIES[name]) for name in chance.sample(sorted(_TOPOLOGIES), 3)]
    spent, best, switches = _run(phases, 0.5, chance)
    assert spent / best - 1 <= 0.05, (spent, best, switches)


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
