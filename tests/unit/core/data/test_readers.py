"""Readers of a stream: a position belongs to one reader, a reader to one rank, and every state is kept exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.micro_batches import deal
from elastic.core.data.readers import ReaderStates, Slots, merged, owned
from elastic.core.errors import IntegrityError

BATCHES = st.integers(1, 40), st.integers(1, 17)


@given(*BATCHES, st.integers(0, 500))
def test_positions_and_samples_of_readers_are_one_to_one(global_batch: int, micro_batch: int, position: int) -> None:
    slots = Slots(global_batch, micro_batch)
    reader, count = slots.place(position)
    assert 0 <= reader < slots.readers
    assert slots.position(reader, count) == position


@given(*BATCHES, st.integers(1, 20), st.integers(0, 5))
def test_a_rank_owns_the_readers_of_its_micro_batches(
    global_batch: int, micro_batch: int, world_size: int, step: int
) -> None:
    slots = Slots(global_batch, micro_batch)
    for rank in range(world_size):
        mine = [batch for batch in deal(step, global_batch, micro_batch, world_size, rank) if batch.weight > 0]
        assert [batch.index for batch in mine] == list(owned(slots.readers, world_size, rank))
        for batch in mine:
            places = [slots.place(position) for position in range(batch.start, batch.stop)]
            first = step * slots.size(batch.index)
            assert places == [(batch.index, first + number) for number in range(slots.size(batch.index))]


def test_a_step_after_a_skipped_block_takes_the_same_readers_later_samples() -> None:
    slots = Slots(8, 3)
    (batch,) = (batch for batch in deal(1, 8, 3, 3, 1, skips=[(8, 16)]) if batch.weight > 0)
    assert slots.place(batch.start) == (1, 6)


def test_states_of_all_ranks_are_merged() -> None:
    parts = [(1, ReaderStates(3, {2: "c"})), (0, ReaderStates(3, {0: "a", 1: "b"})), (2, ReaderStates(3, {}))]
    assert merged(parts) == ReaderStates(3, {0: "a", 1: "b", 2: "c"})
    assert merged([(0, None), (1, None)]) is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{0: "a"}, {2: "c"}], r"of 3 readers, the states of \[1\] are missing"),
        ([{0: "a", 1: "b"}, {1: "b", 2: "c"}], "ranks 0 and 1 both have a state of reader 1"),
        ([{0: "a", 1: "b"}, {2: "c", 3: "d"}], "reader 3 is none of 3 readers"),
        ([{0: "a", 1: "b", 2: "c"}, None], "rank 1 has no reader states"),
    ],
)
def test_a_missing_or_doubled_state_is_refused(parts: list[dict[int, str] | None], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        merged((rank, None if part is None else ReaderStates(3, part)) for rank, part in enumerate(parts))


def test_ranks_that_disagree_on_the_number_of_readers_are_refused() -> None:
    with pytest.raises(IntegrityError, match="rank 1 has states of 4 readers"):
        merged([(0, ReaderStates(3, {0: ""})), (1, ReaderStates(4, {1: ""}))])
