"""What strategies cost on links that are known, and links found from messages that are timed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.hops import BACKEND, NODE, NODES, RANKS, Hop, Islands, exact_costs, feedback_costs, fit_hop


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_islands_are_equal_parts_of_nodes_that_hold_every_rank_once(nodes: list[int]) -> None:
    islands = Islands.of(nodes)
    assert sorted(rank for own in islands.places for rank in own) == list(range(len(nodes)))
    assert {len(own) for own in islands.places} == {islands.width}
    assert all(len({nodes[rank] for rank in own}) == 1 for own in islands.places)
    for rank in range(len(nodes)):
        number, place = islands.find(rank)
        assert islands.places[number][place] == rank
        assert islands.lane(rank)[number] == rank


def test_a_node_with_more_ranks_than_others_is_several_islands() -> None:
    assert Islands.of((7, 7, 3, 7, 7, 3)).places == ((0, 1), (3, 4), (2, 5))
    assert Islands.of((0, 0, 1)).width == 1


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_hop_is_found_within_a_tenth(noise: float) -> None:
    chance = random.Random(1)
    for alpha, beta in ((1e-5, 1e-9), (1e-3, 1e-10), (2e-4, 1e-8)):
        measured = [
            (size, (alpha + beta * size) * (1 + chance.uniform(-noise, noise)))
            for size in (4 << 10, 128 << 10, 2 << 20)
        ]
        found = fit_hop(measured)
        for size in (1 << 10, 64 << 10, 8 << 20):
            assert found.seconds(size) == pytest.approx(alpha + beta * size, rel=0.1)


def test_neither_part_of_a_hop_is_negative() -> None:
    assert fit_hop([(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)]).beta_s_per_byte == 0.0
    assert fit_hop([(1.0, 0.1), (10.0, 10.0), (100.0, 200.0)]).alpha_s == 0.0
    assert fit_hop([(8.0, 2.0)]) == Hop(2.0, 0.0)


_FAST, _SLOW = Hop(1e-5, 1e-10), Hop(1e-4, 1e-8)


def _best(islands: Islands, size: int, hops: dict[str, Hop]) -> str:
    costs = exact_costs(islands, [size], hops)
    return min(costs, key=lambda name: costs[name])


def test_the_fastest_strategy_follows_from_the_links() -> None:
    two_nodes, alone = Islands.of([0] * 8 + [1] * 8), Islands.of([0] * 16)
    never = Hop(1e3, 0.0)
    # Eight lanes share the slow link between the nodes: each has an eighth of its bandwidth.
    hops = {NODE: _FAST, NODES: Hop(1e-4, 8e-8), RANKS: _SLOW, BACKEND: never}
    assert _best(two_nodes, 100 << 20, hops) == "hierarchical"
    assert _best(alone, 100 << 20, {RANKS: _FAST, BACKEND: never}) == "ring"
    assert _best(alone, 64, {RANKS: _FAST, BACKEND: never}) == "tree"
    assert _best(alone, 64, {RANKS: _FAST, BACKEND: Hop(1e-6, 0.0)}) == "all_reduce"


def test_what_is_not_there_is_not_in_the_table() -> None:
    assert exact_costs(Islands.of([0]), [8], {BACKEND: _FAST}).keys() == {"all_reduce"}
    assert exact_costs(Islands.of([0, 1]), [8], {BACKEND: _FAST, RANKS: _SLOW}).keys() == {"all_reduce", "ring", "tree"}


def test_a_ring_and_a_tree_cost_what_the_formulas_say() -> None:
    costs = exact_costs(Islands.of(range(4)), [4000, 400], {BACKEND: _FAST, RANKS: Hop(1.0, 0.001)})
    assert costs["ring"] == pytest.approx(6 * (1 + 1.0) + 6 * (1 + 0.1))
    assert costs["tree"] == pytest.approx(4 * (1 + 4.0) + 4 * (1 + 0.4))


def test_what_is_compressed_pays_where_the_slow_link_is_slow() -> None:
    islands, total = Islands.of([0] * 4 + [1] * 4), 4e9
    sent = {"int8": [total / 16, total / 4096], "top_k": [total / 400] * 2, "power_sgd": [1e5, 1e6, 1e6]}
    for slow, best in ((1e-8, "power_sgd"), (1e-12, "hierarchical")):
        hops = {NODE: Hop(1e-6, 1e-12), NODES: Hop(1e-4, slow), RANKS: Hop(1e-4, slow), BACKEND: Hop(1.0, 1.0)}
        costs = feedback_costs(islands, total, total / 4, sent, hops)
        # Encoding, which is measured, comes on top.
        work = {"hierarchical": 0.0, "int8": 0.05, "top_k": 0.2, "power_sgd": 0.1}
        assert min(costs, key=lambda name: costs[name] + work[name]) == best
    assert costs["int8"] == pytest.approx(6 * (1e-6 + 1e-12 * 1e9) + 2 * 1e-4 + 1e-12 * (total / 16 + total / 4096))
