from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.micro_batches import (
    MicroBatch,
    deal,
    loss_scale,
    micro_steps_per_rank,
    next_position,
    step_positions,
    steps_in,
)
from elastic.core.data.steps import Range, join
from elastic.core.errors import UsageError

WORLD_SIZES = st.integers(1, 64)


def dealt(step: int, batch: int, micro: int, world: int, total: int | None = None) -> list[tuple[MicroBatch, ...]]:
    return [deal(step, batch, micro, world, rank, total) for rank in range(world)]


def weighted(ranks: list[tuple[MicroBatch, ...]]) -> list[MicroBatch]:
    return [batch for rank in ranks for batch in rank if batch.weight > 0]


@given(batch=st.integers(1, 200), micro=st.integers(1, 70), world=WORLD_SIZES, step=st.integers(0, 1000))
def test_every_position_counts_exactly_once(batch: int, micro: int, world: int, step: int) -> None:
    ranks = dealt(step, batch, micro, world)
    positions = Counter(p for part in weighted(ranks) for p in range(part.start, part.stop))
    assert positions == Counter(range(step * batch, (step + 1) * batch))
    assert sum(Fraction(part.samples, batch) for part in weighted(ranks)) == 1
    assert sum(part.weight for part in weighted(ranks)) == pytest.approx(1.0, abs=1e-12)


@given(batch=st.integers(1, 200), micro=st.integers(1, 70), world=WORLD_SIZES)
def test_all_ranks_run_equally_many_passes(batch: int, micro: int, world: int) -> None:
    ranks = dealt(3, batch, micro, world)
    assert {len(rank) for rank in ranks} == {micro_steps_per_rank(batch, micro, world)}
    counted = [sum(part.weight > 0 for part in rank) for rank in ranks]
    assert max(counted) - min(counted) <= 1
    padding = [part for rank in ranks for part in rank if part.weight == 0]
    assert all(3 * batch <= part.start < part.stop <= 4 * batch for part in padding)


@given(batch=st.integers(1, 200), micro=st.integers(1, 70), worlds=st.lists(WORLD_SIZES, min_size=2, max_size=3))
def test_the_cut_does_not_depend_on_the_world_size(batch: int, micro: int, worlds: list[int]) -> None:
    cuts = [sorted(weighted(dealt(5, batch, micro, world)), key=lambda part: part.index) for world in worlds]
    assert all(cut == cuts[0] for cut in cuts)
    assert [part.index for part in cuts[0]] == list(range(-(-batch // micro)))


@given(batch=st.integers(1, 60), micro=st.integers(1, 20), world=WORLD_SIZES, total=st.integers(1, 400))
def test_a_short_last_step_ends_the_data(batch: int, micro: int, world: int, total: int) -> None:
    steps = steps_in(total, batch)
    seen = [
        p
        for s in range(steps)
        for part in weighted(dealt(s, batch, micro, world, total))
        for p in range(part.start, part.stop)
    ]
    assert sorted(seen) == list(range(total))
    last = weighted(dealt(steps - 1, batch, micro, world, total))
    assert sum(part.weight for part in last) == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(ValueError, match="has no samples"):
        deal(steps, batch, micro, world, 0, total)


@given(batch=st.integers(1, 90), micro=st.integers(1, 20), world=WORLD_SIZES)
def test_loss_scale_makes_deepspeeds_mean_the_mean_of_the_batch(batch: int, micro: int, world: int) -> None:
    # A "gradient" per position; the mean loss of a micro-batch has the mean of its gradients.
    gradient = [float((position * 7919) % 101) for position in range(batch)]
    ranks = dealt(0, batch, micro, world)
    passes = len(ranks[0])
    averaged = 0.0
    for rank in ranks:
        for part in rank:
            mean = sum(gradient[part.start : part.stop]) / part.samples
            averaged += loss_scale(part.weight, passes, world) * mean / passes / world
    assert averaged == pytest.approx(sum(gradient) / batch)


def test_neighbours_go_to_the_same_rank() -> None:
    ranks = dealt(1, 32, 4, 3)
    assert [[part.index for part in rank] for rank in ranks] == [[0, 1, 1], [2, 3, 4], [5, 6, 7]]
    assert ranks[0][2] == MicroBatch(1, 36, 40, 0.0)


def test_fewer_micro_batches_than_ranks() -> None:
    ranks = dealt(0, 5, 3, 4)
    assert [[(part.index, part.weight) for part in rank] for rank in ranks] == [
        [(0, 0.0)],
        [(0, 0.6)],
        [(0, 0.0)],
        [(1, 0.4)],
    ]


def test_bad_settings_are_named() -> None:
    for arguments, name in (
        ((0, 0, 1, 1, 0), "global_batch"),
        ((0, 1, 0, 1, 0), "micro_batch"),
        ((0, 1, 1, 0, 0), "world_size"),
    ):
        with pytest.raises(UsageError, match=name):
            deal(*arguments)
    with pytest.raises(ValueError, match="rank 2"):
        deal(0, 4, 1, 2, 2)
    assert step_positions(2, 10) == (20, 30)
    assert step_positions(2, 10, 25) == (20, 25)


# --- skipped ranges --------------------------------------------------------------------------------------------------


def test_a_step_whose_samples_are_skipped_takes_the_next_ones() -> None:
    skips = ((20, 30),)
    assert [step_positions(step, 10, None, skips) for step in range(4)] == [(0, 10), (10, 20), (30, 40), (40, 50)]
    assert [next_position(consumed, skips) for consumed in (0, 19, 20, 21)] == [0, 19, 30, 31]
    # 47 samples of which ten are skipped: three steps and a short one.
    assert step_positions(3, 10, 37, skips) == (40, 47)
    parts = weighted([deal(2, 10, 3, 4, rank, 37, skips) for rank in range(4)])
    assert sorted(p for part in parts for p in range(part.start, part.stop)) == list(range(30, 40))


def test_a_skip_that_cuts_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step 1, positions from 10, is cut in two"):
        step_positions(1, 10, None, ((15, 25),))


@given(batch=st.integers(1, 9), steps=st.integers(1, 12), data=st.data())
def test_whatever_is_found_to_be_bad_every_position_is_consumed_or_skipped(
    batch: int, steps: int, data: st.DataObject
) -> None:
    """The run as the rules have it: a bad step goes back to any state before it, and its samples are skipped."""
    skips: tuple[Range, ...] = ()
    timeline: dict[int, Range] = {}
    step = 0
    while step < steps:
        timeline[step] = positions = step_positions(step, batch, None, skips)
        if len(skips) < 6 and data.draw(st.booleans(), label=f"step {step} is bad"):
            skips = join((*skips, positions))
            step = data.draw(st.integers(0, step), label="goes back to")
            timeline = {number: ranges for number, ranges in timeline.items() if number < step}
        else:
            step += 1
    everything = Counter(p for start, stop in (*timeline.values(), *skips) for p in range(start, stop))
    end = max((stop for _, stop in timeline.values()), default=0)
    assert set(everything.values()) == {1}
    assert set(range(end)) <= everything.keys()
    assert sum(stop - start for start, stop in timeline.values()) == steps * batch
