"""Strategies that change while links do: what was chosen against the best choice in hindsight."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.strategy_switch import (
    WINDOW,
    Choice,
    Pauses,
    Segment,
    Switch,
    Trial,
    first_choice,
    judged,
)

NAMES = ("all_reduce", "ring", "tree", "hierarchical")
STEPS = 6000


def _costs(node: float, nodes: float, backend: float) -> dict[str, float]:
    """Seconds of a step by strategy: 8 ranks, two nodes, which are not neighbours in rank; 200 MB in 8 buckets. `node`,
    `nodes`: seconds per byte within a node and between nodes, where four lanes share the link."""
    total, messages = 2e8, 8
    tree = 2 * (total * (node + 2 * nodes) + messages * 1.1e-4)
    inside, between = 2 * 3 / 4 * total * node, 2 * 1 / 2 * total / 4 * 4 * nodes
    return {
        "all_reduce": messages * 1e-4 + backend * total,
        "ring": 2 * 7 * (total / 8 * nodes + messages * 5e-5),
        "tree": tree,
        "hierarchical": inside + between + messages * (6 * 1e-5 + 2 * 5e-5),
    }


# Of ranks that are not neighbours: every message of a ring crosses.
_TOPOLOGIES = {
    "one switch": _costs(1e-10, 1e-10, 1.5e-10),
    "slow between nodes": _costs(1e-10, 8e-9, 2e-8),
    "the backend knows better": _costs(1e-10, 8e-9, 4e-9),
    "slow within nodes": _costs(4e-9, 4e-10, 2e-9),
}

Noise = Callable[[], float]


def _run(phases: Sequence[Mapping[str, float]], changes: Sequence[int], noise: Noise, every: int) -> float:
    """The regret of a run whose links change before the steps `changes`: seconds as chosen over those of brute force,
    less one. A step takes `noise()` times what its strategy costs, by which brute force is not disturbed alone."""
    spent, best, switch = 0.0, 0.0, Switch.begin(NAMES, every)
    taken: dict[str, list[float]] = {}
    for step in range(STEPS):
        costs = phases[sum(step >= change for change in changes)]
        if step == switch.segment.end:
            switch = switch.heard({name: median(seconds) for name, seconds in taken.items()})
            taken.clear()
        name, disturbed = switch.segment.at(step), noise()
        taken.setdefault(name, []).append(costs[name] * disturbed)
        spent += costs[name] * disturbed
        best += min(costs.values()) * disturbed
    return spent / best - 1


def _phases(chance: random.Random) -> list[dict[str, float]]:
    return [_TOPOLOGIES[name] for name in chance.sample(sorted(_TOPOLOGIES), 3)]


def _noise(chance: random.Random, wrong: float, stalls: float = 0.0) -> Noise:
    """Each step up to `wrong` off, and now and then (`stalls` of the steps) three times as long."""
    return lambda: chance.uniform(1 - wrong, 1 + wrong) * (3.0 if chance.random() < stalls else 1.0)


def test_the_regret_is_small_where_links_change_in_mid_run() -> None:
    found = []
    for seed in range(20):
        chance = random.Random(seed)
        found.append(_run(_phases(chance), (STEPS // 3, STEPS // 3 * 2), _noise(chance, 0.05), every=50))
    found.sort()
    # What the strategy in use does not feel is found late, where the one that has become faster was far slower.
    assert found[18] <= 0.05
    assert found[19] <= 0.1


def test_the_regret_is_small_with_steps_that_are_disturbed() -> None:
    """With the defaults, and changes at any time."""
    found = []
    for seed in range(100):
        chance = random.Random(seed)
        changes = sorted(chance.sample(range(500, STEPS - 500), 2))
        found.append(_run(_phases(chance), changes, _noise(chance, 0.15, stalls=0.05), every=200))
    found.sort()
    assert median(found) <= 0.05
    assert found[90] <= 0.1


def test_a_strategy_that_is_far_slower_is_seldom_tried() -> None:
    """A ring of a thousand ranks."""
    costs = {**_TOPOLOGIES["one switch"], "ring": 40.0 * min(_TOPOLOGIES["one switch"].values())}
    assert _run([costs], [], lambda: 1.0, every=50) <= 0.05


def test_no_single_strategy_would_do() -> None:
    """Each one alone is far above the best choice on the same links, so that the limits above say something."""
    tables = _TOPOLOGIES.values()
    best = sum(min(costs.values()) for costs in tables)
    assert all(sum(costs[name] for costs in tables) > 1.2 * best for name in NAMES)
    assert len({min(costs, key=lambda name, costs=costs: costs[name]) for costs in tables}) >= 3


def _heard(switch: Switch, costs: Mapping[str, float]) -> Switch:
    return switch.heard({name: costs[name] for name in switch.segment.names})


def test_all_are_tried_first_and_those_that_are_near_more_closely() -> None:
    costs = {"all_reduce": 1.2, "ring": 1.0, "tree": 1.4, "hierarchical": 1.1}
    switch = Switch.begin(NAMES, 100)
    # What was slow at the start does not count.
    switch = switch.heard({"all_reduce": 9.0, "ring": 9.0, "tree": 9.0, "hierarchical": 0.1})
    assert (switch.trial, switch.segment) == (Trial.FIRST, Segment(4, NAMES, 1))
    switch = _heard(switch, costs)
    assert switch.segment == Segment(8, ("all_reduce", "ring", "hierarchical"), 3)
    assert [switch.segment.at(step) for step in range(8, 12)] == ["all_reduce", "ring", "hierarchical", "all_reduce"]
    switch = _heard(switch, {**costs, "hierarchical": 0.9})
    assert switch.choice == Choice("hierarchical", 17)
    assert switch.segment == Segment(17, ("hierarchical",), WINDOW)
    assert switch.costs == {**costs, "hierarchical": 0.9}
    while switch.trial is None:
        switch = _heard(switch, switch.costs)
    # A quarter of `every` later, the first choice having been made in haste; not what would cost more than it is worth.
    assert (switch.trial, switch.segment) == (Trial.REGULAR, Segment(47, ("ring",), 1))
    switch = _heard(switch, {"ring": 0.7})
    assert switch.segment == Segment(48, ("ring", "hierarchical"), 3)
    switch = _heard(switch, {"ring": 0.7, "hierarchical": 0.9})
    assert switch.choice == Choice("ring", 54)


def test_a_trial_in_which_nothing_comes_near_is_over_after_one_step() -> None:
    switch = Switch.begin(("ring", "tree"), 100)
    for found in ({"ring": 1.0, "tree": 1.0}, {"ring": 1.0, "tree": 1.2}, {"ring": 1.0, "tree": 1.2}):
        switch = switch.heard(found)
    while switch.trial is None:
        switch = _heard(switch, {"ring": 1.0})
    begun = switch.segment.begin
    switch = _heard(switch, {"tree": 1.5})
    assert (switch.trial, switch.choice.strategy, switch.segment) == (None, "ring", Segment(begun + 1, ("ring",), 10))


def test_exchanges_that_take_another_time_are_a_drift_and_then_usual() -> None:
    pauses = Pauses(100).first(2)

    def after(pauses: Pauses, *windows: float) -> tuple[Pauses, list[bool]]:
        told = []
        for number, seconds in enumerate(windows, start=1):
            pauses, drifted = pauses.window(pauses.last + number * WINDOW, seconds)
            told.append(drifted)
        return pauses, told

    assert after(pauses, 1.0, 1.1, 0.9, 1.2, 0.8, 1.2, 1.1, 1.2)[1] == [False] * 8, "two in a row, and both alike"
    assert after(pauses, 1.0, 1.2, 1.2, 1.2)[1] == [False, False, True, True]
    assert after(pauses, 1.0, 1.0, 0.8, 0.8)[1] == [False, False, False, True]
    missed = pauses.tried(2, False, True)
    later, told = after(missed, *[1.0] + [1.2] * 5)
    assert told == [False] * 4 + [True, True], "half of `every` after a trial, where one has found nothing"
    assert later.tried(60, False, False).usual_s == 1.0
    assert after(later.tried(60, False, True), 1.2, 1.2, 1.2, 1.2)[1] == [False] * 4, "it is usual now"


def test_pauses_double_while_nothing_is_found_and_a_drift_is_looked_into_once_more_soon() -> None:
    pauses, seen = Pauses(100).first(2), []
    for drifted in (True, False, False, True, False):
        pauses = pauses.tried(pauses.last + pauses.pause, False, drifted)
        seen.append((pauses.last + pauses.pause, pauses.misses))
    assert seen == [(52, 1), (152, 1), (352, 1), (552, 2), (752, 2)]
    assert pauses.tried(752, True, True) == Pauses(100, 752, 100)


def test_nothing_is_switched_for_less_than_a_switch_costs() -> None:
    choice = Choice("ring", 0)
    for number in range(1, 100):
        choice = judged(choice, {"ring": 1.001, "tree": 1.0}, number * 10, 10, 10.0)
    assert choice.strategy == "ring"
    assert choice.regret_s["tree"] == pytest.approx(0.99)


def test_what_lasts_is_switched_to_and_what_does_not_is_not() -> None:
    slow, fast = {"ring": 2.0, "tree": 1.0}, {"ring": 1.0, "tree": 2.0}
    choice = judged(Choice("ring", 0), slow, 10, 10, 8.0)
    assert choice.strategy == "ring"
    assert judged(choice, slow, 20, 10, 8.0) == Choice("tree", 20)
    # It was a moment: what was lost in it is won back.
    again = judged(judged(choice, fast, 20, 10, 8.0), slow, 30, 10, 8.0)
    assert again.strategy == "ring"


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=4, max_size=4), min_size=1, max_size=300), st.integers(1, 30))
def test_never_twice_within_an_incident(tables: list[list[float]], every: int) -> None:
    """Whatever is measured: after a switch there is none for `every` steps; the first choice may be mended sooner. No
    step is without a strategy, and all that a segment was measured for is known."""
    switch, switches = Switch.begin(NAMES, every), []
    for seconds in tables:
        before = switch
        switch = _heard(switch, dict(zip(NAMES, seconds, strict=True)))
        assert switch.segment.begin == before.segment.end
        assert set(switch.segment.names) <= set(NAMES)
        if before.trial is not Trial.FIRST and switch.choice.strategy != before.choice.strategy:
            switches.append(switch.choice.since)
    assert all(later - earlier >= every for earlier, later in pairwise(switches))


def test_of_equal_ones_the_first_is_chosen() -> None:
    assert first_choice({"ring": 1.0, "tree": 1.0}, 3) == Choice("ring", 3)
