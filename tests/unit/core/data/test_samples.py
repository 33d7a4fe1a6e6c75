from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.samples import SampleOrder
from elastic.core.errors import UsageError

# Printed once and never to be changed: a run that continues with a newer release must see the same samples.
GOLDEN = {
    (1, 0): [0, 0, 0, 0, 0, 0],
    (2, 0): [1, 0, 0, 1, 0, 1],
    (3, 5): [0, 1, 2, 0, 1, 2],
    (10, 0): [4, 3, 5, 2, 1, 0],
    (1000, 7): [323, 365, 473, 272, 644, 42],
    (10**9, 1): [903555224, 186615572, 810752111, 508399359, 778139931, 679094144],
}


@pytest.mark.parametrize(("key", "indices"), GOLDEN.items())
def test_order_never_changes(key: tuple[int, int], indices: list[int]) -> None:
    assert SampleOrder(*key).indices(0, 6) == indices


@given(size=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6), shuffle=st.booleans())
def test_every_epoch_holds_every_sample_once(size: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = SampleOrder(size, seed, shuffle)
    places = [order.at(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert {number for number, _ in places} == {epoch}
    assert sorted(index for _, index in places) == list(range(size))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9), st.integers(0, 10**6))
def test_a_local_order_holds_every_sample_once(size: int, block: int, at_once: int, epoch: int) -> None:
    order = SampleOrder(size, 3, block=block, at_once=at_once)
    indices = order.indices(epoch * size, (epoch + 1) * size)
    assert sorted(indices) == list(range(size))
    whole = size // block * block
    for begin in range(0, whole, at_once * block):
        window = indices[begin : min(begin + at_once * block, whole)]
        # Whole blocks, all of which lie in this window.
        assert Counter(index // block for index in window) == dict.fromkeys({i // block for i in window}, block)
    assert sorted(indices[whole:]) == list(range(whole, size))


def test_a_local_order_is_another_one_in_each_epoch_and_within_each_block() -> None:
    order = SampleOrder(800, 3, block=100, at_once=2)
    first, second = order.indices(0, 800), order.indices(800, 1600)
    assert [i // 100 for i in first[::200]] != [i // 100 for i in second[::200]]
    assert first[:200] != sorted(first[:200])
    # Both blocks of a window are mixed.
    assert len({index // 100 for index in first[:20]}) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 255, 256, 257, 4095, 4097])
def test_bijection_around_powers_of_two(size: int) -> None:
    assert sorted(SampleOrder(size, 11).indices(size, 2 * size)) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(SampleOrder(100, seed).indices(epoch * 100, epoch * 100 + 100)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_small_sets_see_every_permutation() -> None:
    order = SampleOrder(3, 0)
    seen = Counter(tuple(order.indices(epoch * 3, epoch * 3 + 3)) for epoch in range(600))
    assert len(seen) == 6
    assert min(seen.values()) > 50  # 100 expected each


def test_no_index_prefers_a_place() -> None:
    size = 37
    order = SampleOrder(size, 2)
    first = Counter(order.at(epoch * size)[1] for epoch in range(3700))
    # 100 expected each; chi-squared with 36 degrees of freedom is above 86 once in 200,000 fair runs.
    assert sum((first[index] - 100) ** 2 / 100 for index in range(size)) < 86


def test_range_runs_over_the_end_of_an_epoch() -> None:
    order = SampleOrder(10, 3)
    assert order.indices(7, 23) == [order.at(position)[1] for position in range(7, 23)]
    assert [order.at(position)[0] for position in (9, 10, 19, 20)] == [0, 1, 1, 2]


def test_without_shuffle_it_is_the_identity() -> None:
    assert SampleOrder(4, 9, shuffle=False).indices(2, 9) == [2, 3, 0, 1, 2, 3, 0]


def test_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys; from elastic.core.data.samples import *; sys.stdout.write(str(SampleOrder(1000, 7).indices(0, 6)))"
    )
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
        )
        assert done.stdout.decode() == str(GOLDEN[1000, 7])


def test_refuses_what_has_no_order() -> None:
    with pytest.raises(UsageError, match="at least one sample"):
        SampleOrder(0)
    with pytest.raises(ValueError, match="begin at 0"):
        SampleOrder(5).at(-1)
