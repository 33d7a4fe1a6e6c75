"""When islands exchange what, where a run may stop, and which ranks are an island."""

from __future__ import annotations

import pytest

from elastic.core.checkpoint.rounds import Rounds, islands_of
from elastic.core.settings import CommunicationSettings


def test_without_islands_every_step_is_whole() -> None:
    for settings in (None, CommunicationSettings(), CommunicationSettings("error_feedback")):
        rounds = Rounds.of(settings)
        assert [rounds.next_whole(step) for step in range(4)] == [0, 1, 2, 3]
        assert rounds.longest_wait == 1


def test_a_run_stops_after_an_outer_step() -> None:
    rounds = Rounds.of(CommunicationSettings("local", "diloco", every_steps=4))
    assert [step for step in range(1, 13) if rounds.begins(step) is not None] == [4, 8, 12]
    assert [rounds.next_whole(step) for step in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert rounds.longest_wait == 4


def test_what_servers_keep_is_taken_at_the_end_of_a_round_also_without_staleness() -> None:
    served = CommunicationSettings("async", "parameter_server", staleness=0, every_steps=5)
    assert Rounds.of(served).next_whole(6) == 10
    assert Rounds.of(CommunicationSettings("async", staleness=0, every_steps=5)).next_whole(6) == 6


@pytest.mark.parametrize(("every", "fragments", "overlap"), [(6, 3, 0), (6, 3, 1), (8, 2, 3), (4, 1, 2), (3, 3, 0)])
def test_every_fragment_is_exchanged_once_in_a_round(every: int, fragments: int, overlap: int) -> None:
    settings = CommunicationSettings(
        "local", "streaming_diloco", every_steps=every, fragments=fragments, overlap_steps=overlap
    )
    rounds = Rounds.of(settings)
    begun = {step: rounds.begins(step) for step in range(1, 4 * every + 1)}
    for first in range(1, 3 * every):
        seen = [begun[step] for step in range(first, first + every) if begun[step] is not None]
        assert sorted(seen) == list(range(fragments))
    under_way = {step + late for step, fragment in begun.items() if fragment is not None for late in range(overlap)}
    for step in range(1, 3 * every):
        whole = rounds.next_whole(step)
        assert whole >= step
        assert whole not in under_way
        assert all(other in under_way for other in range(step, whole))
        assert whole - step < rounds.longest_wait


def test_an_island_is_a_node() -> None:
    assert islands_of((0, 1, 0, 1, 1)) == ((0, 2), (1, 3, 4))
    assert islands_of((7, 7, 7)) == ((0, 1, 2),)


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1, 2, 3), (0, 0, 0, 1), (0,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_islands_by_number(nodes: tuple[int, ...], count: int) -> None:
    """All ranks, rank 0 in the first, no island empty, and no node cut where that can be."""
    found = islands_of(nodes, count)
    assert sorted(rank for own in found for rank in own) == list(range(len(nodes)))
    assert len(found) == min(count, len(nodes))
    assert all(found)
    assert 0 in found[0]
    if count <= len(set(nodes)):
        homes = [{nodes[rank] for rank in own} for own in found]
        assert sum(map(len, homes)) == len(set(nodes))
