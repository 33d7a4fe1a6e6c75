from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.micro_batches import deal, loss_scale, micro_batches_in, micro_steps_per_rank
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.unfinished import Rest, kept_factor, rest_of


def of_kills(batch: int, micro: int, world: int, kept: list[int]) -> list[int]:
    """`holders`, where rank r has finished its first kept[r] micro-batches; -1: it was lost."""
    holders = [0] * micro_batches_in(batch, micro)
    for rank, finished in enumerate(kept):
        for part in deal(3, batch, micro, world, rank)[: max(finished, 0)]:
            holders[part.index] += part.weight > 0
    return holders


@given(
    batch=st.integers(1, 120), micro=st.integers(1, 9), kept=st.lists(st.integers(-1, 40), min_size=2, max_size=9),
    after=st.integers(1, 9),
)  # fmt: skip
def test_what_is_held_and_what_is_dealt_again_are_the_step(batch: int, micro: int, kept: list[int], after: int) -> None:
    holders = of_kills(batch, micro, len(kept), kept)
    rest = rest_of(3, holders, after)
    only = None if rest is None else rest.indices
    ranks = [deal(3, batch, micro, after, rank, only=only) for rank in range(after)]
    dealt = Counter(part.index for rank in ranks for part in rank if part.weight > 0)
    held = Counter({index: count for index, count in enumerate(holders) if count and rest is not None})
    assert dealt + held == Counter(range(len(holders)))
    assert len({len(rank) for rank in ranks}) == 1
    passes = len(ranks[0])
    whole = micro_steps_per_rank(batch, micro, after)
    assert 1 <= passes < whole if rest is not None else passes == whole
    counted = [sum(part.weight > 0 for part in rank) for rank in ranks]
    assert max(counted) - min(counted) <= 1
    positions = range(3 * batch, 4 * batch)
    assert all(part.start in positions and part.stop - 1 in positions for rank in ranks for part in rank)


@given(
    batch=st.integers(2, 60), micro=st.integers(1, 5),
    kept=st.lists(st.lists(st.integers(-1, 12), min_size=2, max_size=5), min_size=1, max_size=3),
    last=st.integers(1, 4),
)  # fmt: skip
def test_the_gradient_is_the_mean_over_the_global_batch(
    batch: int, micro: int, kept: list[list[int]], last: int
) -> None:
    """The engine's arithmetic in whole numbers: sums per rank over generations that each lose ranks, then one that
    reduces. Every micro-batch's own gradient is a unit vector."""
    sums: list[dict[int, Fraction]] = []
    before, rest = 0, None
    for finished in (*kept, None):
        world = last if finished is None else len(finished)
        if before:
            holders = [0] * micro_batches_in(batch, micro)
            for vector in sums:
                for index in vector:
                    holders[index] += 1
            rest = rest_of(3, holders, world)
        survivors = sums if rest is not None else []
        factor = Fraction(world, before or world)
        assert float(factor) == kept_factor(before or world, world)
        # A rank that was lost is replaced by one that holds nothing; where fewer ranks follow, nobody may be left out.
        if len(survivors) > world:
            return
        sums = [{index: value * factor for index, value in vector.items()} for vector in survivors]
        sums += [{} for _ in range(world - len(sums))]
        gas = micro_steps_per_rank(batch, micro, world)
        for rank, vector in enumerate(sums):
            parts = deal(3, batch, micro, world, rank, only=None if rest is None else rest.indices)
            done = len(parts) if finished is None else max(finished[rank], 0)
            for part in parts[:done]:
                weight = Fraction(part.samples, batch) if part.weight else Fraction(0)
                assert abs(loss_scale(part.weight, gas, world) - float(weight * gas * world)) < 1e-9
                if weight:
                    vector[part.index] = vector.get(part.index, Fraction(0)) + weight * gas * world / gas
        if finished is not None:
            sums = [vector for rank, vector in enumerate(sums) if finished[rank] >= 0]
            before = world
        else:
            gradient: dict[int, Fraction] = {}
            for vector in sums:
                for index, value in vector.items():
                    gradient[index] = gradient.get(index, Fraction(0)) + value / world
            shares = [Fraction(min(micro, batch - index * micro), batch) for index in range(len(holders))]
            assert gradient == dict(enumerate(shares))


def test_a_rank_lost_at_its_last_of_sixteen_costs_its_own_share() -> None:
    kept = [16, -1, 16, 16]
    rest = rest_of(3, of_kills(64, 1, 4, kept), 3)
    assert rest == Rest(3, tuple(range(16, 32)))
    plan = StepPlan(64, 1, 3, 0, None, None, 22, rest=rest)
    assert [len(plan.deal(step)) for step in (2, 3, 4)] == [22, 6, 22]


def test_nothing_is_kept_that_saves_no_pass_or_would_count_twice() -> None:
    assert rest_of(0, [1, 1, 0, 0], 2) == Rest(0, (2, 3))
    assert rest_of(0, [1, 1, 0, 0], 4) is None, "one pass as before"
    assert rest_of(0, [0, 0, 0, 0], 2) is None
    assert rest_of(0, [1, 2, 1, 0], 1) is None
    assert rest_of(0, [1, 1, 1, 1], 1) == Rest(0, ()), "a padding pass reduces what is held"
