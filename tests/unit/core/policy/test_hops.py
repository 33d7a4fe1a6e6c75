"""Islands of ranks, and links found from messages that are timed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.policy.hops import Hop, Islands, fit_hop


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
