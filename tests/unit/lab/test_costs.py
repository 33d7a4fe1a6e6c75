"""The lab's formulas against figures worked out by hand."""

from __future__ import annotations

import pytest
from lab.costs import Cost, hierarchical, payload, ring, tree


def test_all_reduce_on_four_ranks_two_to_a_node() -> None:
    """1200 bytes. Ring: 2 * 3 messages of 300. Tree: up and down two levels, all of it. Hierarchical: 600 to the
    neighbour, a ring of two over 600 (300 each time), 600 back."""
    assert ring(4, 1200) == Cost(6, 1800)
    assert tree(4, 1200) == Cost(4, 4800)
    assert hierarchical(4, 2, 1200) == Cost(4, 600 + 300 + 300 + 600)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 64])
def test_limits(ranks: int) -> None:
    """One node, or nodes of one rank: hierarchical is a ring. It never sends more than the ring."""
    assert hierarchical(ranks, ranks, 960) == ring(ranks, 960)
    assert hierarchical(ranks, 1, 960) == ring(ranks, 960)
    assert tree(ranks, 960).messages == 2 * (ranks - 1).bit_length()


def test_hierarchical_saves_messages_and_no_bytes() -> None:
    assert hierarchical(64, 8, 6400).bytes == pytest.approx(ring(64, 6400).bytes)
    assert hierarchical(64, 8, 6400).messages == 2 * 7 + 2 * 7 < ring(64, 6400).messages == 126


def test_payload_of_a_step() -> None:
    """Tensors of 10 and 7 elements on 3 ranks: padded to 12 and 9, 84 bytes."""
    assert payload([10, 7], 0, 3, 2) == {"all_reduce": 68 + 4}
    three = {"all_gather_into_tensor": 168, "reduce_scatter_tensor": 168, "all_reduce": 8}
    assert payload([10, 7], 3, 3, 2) == three
    assert payload([10, 7], 3, 3, 2, first=True) == {**three, "all_gather_into_tensor": 252}
    with pytest.raises(ValueError, match="stages 0 and 3, not 2"):
        payload([10, 7], 2, 3, 2)
