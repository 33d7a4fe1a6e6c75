"""Steps of readers that end at different times: cut as they have samples, dealt by the whole step's ownership."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.finite import FinitePlace, deal_cut
from elastic.core.data.micro_batches import deal
from elastic.core.data.readers import Slots, owned
from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.errors import UsageError

CUTS = st.lists(st.integers(0, 5), min_size=1, max_size=14).filter(any)


@given(CUTS, st.integers(1, 20), st.integers(0, 100))
def test_every_sample_of_a_step_is_dealt_once_with_its_share(cut: list[int], world_size: int, start: int) -> None:
    dealt = [deal_cut(start, cut, world_size, rank) for rank in range(world_size)]
    assert len({len(batches) for batches in dealt}) == 1
    real = [batch for batches in dealt for batch in batches if batch.weight > 0]
    positions = [position for batch in real for position in range(batch.start, batch.stop)]
    assert positions == list(range(start, start + sum(cut)))
    assert math.isclose(sum(batch.weight for batch in real), 1.0)
    assert all(batch.weight == batch.samples / sum(cut) and batch.samples == cut[batch.index] for batch in real)
    for rank, batches in enumerate(dealt):
        assert all(batch.index in owned(len(cut), world_size, rank) for batch in batches if batch.weight > 0)
        assert all(batch.samples > 0 for batch in batches)


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 12), st.integers(0, 4))
def test_a_whole_step_is_dealt_as_that_of_an_endless_stream(
    global_batch: int, micro_batch: int, world_size: int, step: int
) -> None:
    slots = Slots(global_batch, micro_batch)
    cut = [slots.size(reader) for reader in range(slots.readers)]
    for rank in range(world_size):
        real = [batch for batch in deal_cut(step * global_batch, cut, world_size, rank) if batch.weight > 0]
        whole = [batch for batch in deal(step, global_batch, micro_batch, world_size, rank) if batch.weight > 0]
        assert real == whole


def test_an_epoch_ends_when_no_reader_has_a_sample() -> None:
    place = FinitePlace(epochs=2).agreed([2, 2, 1])
    assert (place.cut, place.end, place.over) == ((2, 2, 1), 5, False)
    place = place.after_step().agreed([0, 1, 0])
    assert (place.step, place.samples, place.position, place.end) == (1, 5, 5, 6)
    place = place.after_step().agreed([0, 0, 0])
    assert (place.epoch, place.step, place.cut, place.over) == (1, 2, (), False)
    place = place.agreed([1, 0, 0]).after_step().agreed([0, 0, 0])
    assert (place.epoch, place.step, place.samples, place.over) == (2, 3, 7, True)
    assert not FinitePlace(None, epoch=1000).over


def test_an_epoch_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="no samples in epoch 0: none of its 2 readers"):
        FinitePlace().agreed([0, 0])
    turned = FinitePlace().agreed([1, 0]).after_step().agreed([0, 0])
    with pytest.raises(UsageError, match="no samples in epoch 1"):
        turned.agreed([0, 0])


def test_samples_that_are_left_out_are_not_counted_as_trained_on() -> None:
    place = FinitePlace().agreed([2, 1]).left_out()
    assert (place.step, place.samples, place.position, place.cut) == (0, 0, 3, ())
    # They were an epoch all the same.
    assert place.agreed([0, 0]).epoch == 1


def plan(place: FinitePlace, rank: int = 0, max_steps: int | None = None) -> StepPlan:
    return StepPlan(5, 2, 2, rank, None, total_samples(None, 5, max_steps, None), 2, finite=place)


def test_the_plan_deals_what_was_agreed_and_until_then_a_whole_step() -> None:
    open_place = FinitePlace(3, step=4, samples=17, position=20, epoch=1)
    assert [batch.samples for rank in (0, 1) for batch in plan(open_place, rank).deal(4) if batch.weight] == [2, 2, 1]
    agreed = plan(open_place.agreed([0, 1, 1]), 1)
    assert [(batch.start, batch.stop) for batch in agreed.deal(4)] == [(20, 21), (21, 22)]
    assert agreed.positions(4) == (20, 22)
    assert (agreed.position(4), agreed.consumed(4), agreed.consumed(5), agreed.epoch(4)) == (20, 17, 19, 1)


def test_the_plan_knows_the_end_of_the_run_but_no_lengths() -> None:
    over = FinitePlace(2, step=9, epoch=2)
    assert plan(over).over(9)
    assert plan(over).epoch(9) == 1
    assert not plan(FinitePlace(2, step=9, epoch=1)).over(9)
    assert plan(FinitePlace(step=9), max_steps=9).over(9)
    assert (plan(FinitePlace()).bounded, plan(FinitePlace(3)).bounded) == (False, True)
    assert plan(FinitePlace(), max_steps=9).bounded
    with pytest.raises(TypeError, match="no length"):
        plan(FinitePlace(3)).batches_in(0)
