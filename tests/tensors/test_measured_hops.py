"""What a look at the links sends."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch

from elastic.comm.strategies.measured_hops import measure_hops
from elastic.comm.strategies.messages import Messages
from elastic.core.policy.hops import BACKEND, NODE, NODES, RANKS, Islands


class Sent:
    """Messages of rank 0 of four on two nodes, which take no time; the slowest rank's times are given."""

    rank, ranks = 0, 4

    def __init__(self, slowest_s: float) -> None:
        self.sizes: Counter[tuple[str, int]] = Counter()
        self._slowest_s = slowest_s

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.sizes[BACKEND, tensor.nbytes] += 1

    def exchange(self, given: torch.Tensor, to: int, taken: torch.Tensor, source: int) -> None:
        self.sizes[f"to {to}", given.nbytes] += 1

    def slowest(self, seconds: list[float], device: torch.device) -> list[float]:
        return [self._slowest_s] * len(seconds)


def _look(largest: int, again: bool) -> tuple[Sent, dict[str, Any], float]:
    sent = Sent(0.5)
    islands = Islands.of((0, 1, 0, 1))
    hops, spent_s = measure_hops(islands, cast("Messages", sent), torch.device("cpu"), largest, again)
    return sent, hops, spent_s


@pytest.mark.parametrize(("again", "times"), [(False, 4), (True, 2)])
def test_a_look_sends_each_size_of_each_kind(again: bool, times: int) -> None:
    """Rank 0's next one is rank 1, also the one at its place on the next node; within its node it is rank 2."""
    sent, hops, spent_s = _look(1 << 30, again)
    sizes = (4 << 10, 128 << 10, 2 << 20)
    assert hops.keys() == {BACKEND, RANKS, NODE, NODES}
    assert sent.sizes == {
        **{(BACKEND, size): times for size in sizes},
        **{("to 1", size): 2 * times for size in sizes},
        **{("to 2", size): times for size in sizes},
    }
    assert spent_s == pytest.approx(0.5 * 4 * 3 * times), "of the slowest rank, warm-up included"


@pytest.mark.parametrize(("largest", "most"), [(700_002, 700_000), (200_000, 128 << 10), (0, 128 << 10)])
def test_no_message_is_larger_than_what_is_to_be_known(largest: int, most: int) -> None:
    sent, _, _ = _look(largest, again=True)
    assert max(size for _, size in sent.sizes) == most
    assert len({size for _, size in sent.sizes}) == (3 if most > 128 << 10 else 2)
