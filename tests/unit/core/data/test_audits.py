from __future__ import annotations

import math
import random
import struct
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic.core.data.audits import (
    MOST_ROUNDING,
    AuditPlan,
    Computation,
    Round,
    difference,
    disputed,
    not_reproducible,
    refused_audit,
    tolerated,
    vote,
)
from elastic.core.data.micro_batches import micro_steps_per_rank
from elastic.core.data.step_plan import StepPlan

SIZES = st.integers(2, 24)


def plan(world: int, rank: int = 0, every: int = 5, first: int = 0, turn: int = 1, **more: int | None) -> StepPlan:
    facts = {"global_batch": 30, "micro_batch": 4, "dataset_size": 500, "total_samples": 1207} | more
    micro_steps = micro_steps_per_rank(30, 4, world)
    return StepPlan(world_size=world, rank=rank, micro_steps=micro_steps, audit=AuditPlan(every, first, turn), **facts)


def computed(seed: int, rank: int = 0, parts: int = 3) -> Computation:
    """What a rank finds for the micro-batch `seed`: sums and squared norms of gradients of every magnitude."""
    rng, values = random.Random(seed), [random.Random(seed).uniform(0.0, 9.0)]
    for _ in range(parts):
        scale = 10.0 ** rng.uniform(-12, 6)
        gradient = [rng.gauss(0.0, scale) for _ in range(rng.randint(1, 30))]
        values += [sum(gradient), sum(g * g for g in gradient)]
    return Computation(rank, tuple(values))


def rounded(one: Computation, rank: int, seed: int, share: float) -> Computation:
    """The same but for rounding: each value is off by at most `share` of the size of its part."""
    rng, values = random.Random(seed), list(one.values)
    values[0] *= 1.0 + rng.uniform(-share, share)
    for at in range(1, len(values), 2):
        norm = math.sqrt(values[at + 1])
        values[at] += norm * rng.uniform(-share, share)
        values[at + 1] *= 1.0 + rng.uniform(-share, share)
    return Computation(rank, tuple(values))


def flipped(one: Computation, rank: int, at: int, bit: int) -> Computation:
    values = list(one.values)
    (bits,) = struct.unpack("<Q", struct.pack("<d", values[at]))
    (values[at],) = struct.unpack("<d", struct.pack("<Q", bits ^ (1 << bit)))
    return Computation(rank, tuple(values))


@given(world=SIZES, every=st.integers(1, 9), first=st.integers(0, 30), turn=st.integers(0, 50), step=st.integers(0, 39))
def test_everybody_is_computed_by_another_and_in_a_vote_by_a_third(
    world: int, every: int, first: int, turn: int, step: int
) -> None:
    made = plan(world, every=every, first=first, turn=turn)
    audited = {rank: found for rank in range(world) if (found := made.audited(step, rank)) is not None}
    assert audited
    for round_ in Round:
        of = [made.repeats(step, rank, round_) for rank in range(world)]
        assert set(of) <= audited.keys()
        if len(audited) == world:
            assert sorted(of) == list(range(world)), "each by one"
            assert (of == list(range(world))) == (round_ is Round.OWN or (round_ is Round.THIRD and world == 2))
        if len(audited) == world > 2 and round_ is Round.THIRD:
            second = [made.repeats(step, rank, Round.OTHER) for rank in range(world)]
            assert all(one != other for one, other in zip(of, second, strict=True))
        for rank in range(world):
            repeated = replace(made, rank=rank).repeated(step, round_)
            original = audited[of[rank]]
            assert (repeated.index, repeated.start, repeated.stop) == (original.index, original.start, original.stop)
            assert (repeated.weight, repeated.audited_weight) == (0.0, original.weight)


@given(world=st.integers(1, 12), every=st.integers(1, 9), first=st.integers(0, 20), epoch=st.integers(0, 2))
def test_the_loader_knows_its_length(world: int, every: int, first: int, epoch: int) -> None:
    for rank in {0, world - 1}:
        made = plan(world, rank, every, first)
        last = made.last_step
        assert last is not None
        given_out = sum(len(made.deal(step)) for step in range(last) if made.epoch(step) == epoch)
        assert made.batches_in(epoch) == given_out


@given(world=SIZES, every=st.integers(1, 9), first=st.integers(0, 20), step=st.integers(0, 39))
def test_the_step_itself_is_the_same(world: int, every: int, first: int, step: int) -> None:
    for rank in range(world):
        made = plan(world, rank, every, first)
        dealt, bare = made.deal(step), replace(made, audit=None).deal(step)
        assert dealt[: len(bare)] == bare
        assert [batch.weight for batch in dealt[len(bare) :]] == [0.0] * len(made.audits(step))
        due = ((step == first) + ((step + 1) % every == 0)) * (world > 1)
        assert len(dealt) - len(bare) == due, "at most one in every_steps, and one per generation"
    assert plan(1, every=1).audits(step) == ()


def test_every_micro_batch_has_its_turn() -> None:
    made = plan(2, every=7, total_samples=None)
    seen = {
        (rank, found.index) for step in range(0, 35) for rank in (0, 1) if (found := made.audited(step * 7 + 6, rank))
    }
    assert {index for _, index in seen} == set(range(8))


def test_ten_thousand_healthy_audits_have_no_alarm() -> None:
    """Bitwise, and with the rounding of devices that add in another order each time, measured once per ten audits."""
    alarms = 0
    for number in range(10_000):
        rng = random.Random(number // 10)
        share = rng.choice((0.0, 0.0, 1e-12, 1e-7, 1e-5))
        world = rng.randint(2, 6)
        measured = max(
            difference(computed(rank), rounded(computed(rank), rank, number // 10, share))[0] for rank in range(world)
        )
        tolerance = tolerated(measured, on_gpu=False)
        found = {}
        for rank in range(world):
            own = replace(computed(number * 7 + rank, rank), rank=rank)
            found[rank] = [own, rounded(own, (rank + 1) % world, number + rank, share)]
        alarms += bool(disputed(found, tolerance))
    assert alarms == 0


@given(seed=st.integers(0, 10**6), at=st.integers(0, 6), bit=st.integers(44, 63), wrong=st.integers(0, 2))
def test_a_flip_is_found_and_the_rank_is_named(seed: int, at: int, bit: int, wrong: int) -> None:
    """Also within the tolerance of a device that is not reproducible."""
    share = random.Random(seed).choice((0.0, 1e-9, 1e-7))
    true = computed(seed)
    ranks = [rounded(true, rank, seed + rank, share) for rank in range(3)]
    ranks[wrong] = flipped(ranks[wrong], wrong, at, bit)
    tolerance = tolerated(2 * share, on_gpu=False)
    assume(difference(true, ranks[wrong])[0] > 4 * tolerance + 1e-12)
    found = {0: ranks}
    assert disputed(found, tolerance) == (0,)
    verdict = vote(0, ranks, tolerance)
    assert (verdict.wrong, verdict.undecided) == ((wrong,), ())
    assert f"differ by {max(difference(a, b)[0] for a in ranks for b in ranks):.2g}" in verdict.evidence


def test_how_much_two_computations_differ() -> None:
    one = Computation(0, (2.0, 3.0, 25.0, 0.0, 0.0))
    assert difference(one, one) == (0.0, None)
    assert difference(one, Computation(1, (2.5, 3.0, 25.0, 0.0, 0.0))) == (0.2, None)
    # Of the norm, 5, not of the sum, which may be next to nothing.
    assert difference(one, Computation(1, (2.0, 3.5, 25.0, 0.0, 0.0))) == (0.1, 0)
    assert difference(one, Computation(1, (2.0, 3.0, 25.0, 1.0, 1.0))) == (1.0, 1)
    nan = Computation(1, (math.nan, 3.0, 25.0, 0.0, 0.0))
    assert difference(one, nan) == (math.inf, None)
    assert difference(nan, replace(nan, rank=0)) == (0.0, None), "an anomaly that all have is not the audit's"
    overflow = Computation(1, (2.0, math.inf, math.inf, 0.0, 0.0))
    assert difference(overflow, overflow) == (0.0, None)
    assert difference(one, overflow) == (math.inf, 0)


A, B = computed(1), computed(2)


@pytest.mark.parametrize(
    ("who", "wrong", "undecided"),
    [
        # Rank 0's micro-batch: by itself, by 1, by 2.
        ((A, B, A), (1,), ()),
        ((B, A, A), (0,), ()),
        ((A, B, computed(3)), (), (0, 1, 2)),
    ],
)
def test_the_majority_of_ranks_decides(
    who: tuple[Computation, ...], wrong: tuple[int, ...], undecided: tuple[int, ...]
) -> None:
    verdict = vote(0, [replace(one, rank=rank) for rank, one in enumerate(who)], 0.0)
    assert (verdict.wrong, verdict.undecided) == (wrong, undecided)


def test_of_two_ranks_only_one_that_contradicts_itself_is_named() -> None:
    def said(*found: tuple[int, Computation]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        verdict = vote(0, [replace(one, rank=rank) for rank, one in found], 0.0)
        return verdict.wrong, verdict.undecided

    assert said((0, A), (1, B), (0, A)) == ((), (0, 1))
    assert said((0, A), (1, B), (0, B)) == ((0,), ())
    assert said((0, A), (0, B), (1, computed(3))) == ((0,), ())


def test_the_tolerance_is_what_was_measured_and_on_a_gpu_the_rounding_of_bf16_at_least() -> None:
    assert tolerated(0.0, on_gpu=False) == 0.0
    assert tolerated(1e-6, on_gpu=False) == pytest.approx(32e-6)
    assert tolerated(1.0, on_gpu=False) == MOST_ROUNDING
    assert tolerated(0.0, on_gpu=True) == 2.0**-7


def test_other_kinds_of_devices_and_scripts_are_not_compared() -> None:
    found = {0: [A, replace(B, rank=1, kind=7.0)], 1: [B, replace(B, rank=0)]}
    assert disputed(found, 0.0) == ()
    assert disputed({0: [A, replace(B, rank=1)]}, 0.0) == (0,)


def test_one_faulty_rank_is_told_from_a_loss_that_nobody_can_repeat() -> None:
    """It is in two disputes: over its own micro-batch, and over the one that it repeats."""
    assert [not_reproducible(2, size, measuring=False) for size in (2, 3, 4, 8)] == [False] * 4
    assert [not_reproducible(size, size, measuring=False) for size in (2, 3, 4, 8)] == [False, True, True, True]
    assert [not_reproducible(1, size, measuring=True) for size in (2, 3, 8)] == [False] * 3
    assert [not_reproducible(size, size, measuring=True) for size in (2, 3, 8)] == [True] * 3


def test_what_cannot_be_audited_is_refused() -> None:
    assert refused_audit(1, streams=False) is None
    assert "with mesh: {sp: 2} a rank computes its part of a sequence only" in (refused_audit(2, False) or "")
    assert "with mesh: {tp: 2} a rank computes its slices of the layers only" in (refused_audit(1, False, 2) or "")
    assert "use a map-style dataset, or leave audit out" in (refused_audit(1, True) or "")
