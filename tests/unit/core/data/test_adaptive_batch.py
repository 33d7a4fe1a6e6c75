"""A batch that follows the number of workers: every sample once, and rates that are a function of the steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.data.adaptive_batch import AdaptiveBatch, Change, changed, consumed, refused_adaptive
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings

MICRO, MOST, PER = 3, 5, 2
FULL = MICRO * MOST * PER


def _plan(workers: int, rank: int, batch: BatchSettings, size: int) -> StepPlan:
    adaptive = AdaptiveBatch("linear")
    present = adaptive.batch(FULL, MICRO, workers, MOST)
    plan = StepPlan(
        present, MICRO, workers, rank, size, None, PER, adaptive=adaptive, full_batch=FULL,
        changes=(Change(0, 0, present),),
    )  # fmt: skip
    return replace(plan, total_samples=plan.total(batch))


@given(st.lists(st.tuples(st.integers(1, MOST), st.integers(0, 6)), min_size=1, max_size=6), st.booleans())
def test_every_sample_once_whatever_the_batches(parts: list[tuple[int, int]], by_epochs: bool) -> None:
    """The run ends after two epochs of 71 samples, the last step short; or after 9 steps, however large."""
    batch = BatchSettings(epochs=2) if by_epochs else BatchSettings(max_steps=9)
    changes, step, seen = (Change(0, 0, FULL // MOST * parts[0][0]),), 0, list[int]()
    for number, (workers, steps) in enumerate([*parts, (3, 1000)]):
        plans = [_plan(workers, rank, batch, 71).from_step(step, changes, batch) for rank in range(workers)]
        for _ in range(steps):
            if plans[0].over(step):
                break
            dealt = [micro for plan in plans for micro in plan.deal(step)]
            assert len({len(plan.deal(step)) for plan in plans}) == 1
            positions = [at for micro in dealt if micro.weight for at in range(micro.start, micro.stop)]
            assert sorted(positions) == list(range(*plans[0].positions(step)))
            assert sum(micro.weight for micro in dealt) == pytest.approx(1.0)
            assert plans[0].consumed(step) == len(seen)
            seen += sorted(positions)
            step += 1
            assert plans[0].consumed(step) == len(seen)
        changes = plans[0].changes
        assert number < len(parts) or plans[0].over(step)
    assert seen == list(range(len(seen)))
    assert len(seen) == 142 if by_epochs else step == 9
    assert consumed(changes, step) >= len(seen)


def test_only_what_has_changed_is_kept() -> None:
    first = (Change(0, 0, 30),)
    assert changed(first, 4, 120, 30) == first
    second = changed(first, 4, 120, 18)
    assert second == (Change(0, 0, 30), Change(4, 120, 18))
    # The generation before did no step with its batch.
    assert changed(second, 4, 120, 12) == (Change(0, 0, 30), Change(4, 120, 12))
    assert changed(second, 4, 120, 30) == first
    assert changed(first, 0, 0, 12) == (Change(0, 0, 12),)


CHANGES = (Change(0, 0, 12), Change(4, 48, 30), Change(10, 228, 6))


@pytest.mark.parametrize(
    ("rate", "warmup", "expected"),
    [
        ("linear", 0, {0: 0.4, 3: 0.4, 4: 1.0, 9: 1.0, 10: 0.2, 99: 0.2}),
        ("sqrt", 0, {0: 0.4**0.5, 4: 1.0, 10: 0.2**0.5}),
        ("constant", 3, {0: 1.0, 4: 1.0, 10: 1.0}),
        # Up in a line, down at once.
        ("linear", 2, {3: 0.4, 4: 0.6, 5: 0.8, 6: 1.0, 9: 1.0, 10: 0.2}),
        # The warm-up is not over when the batch falls.
        ("linear", 11, {4: 0.45, 9: 0.7, 10: 0.2}),
    ],
)
def test_the_rate_follows_the_batch(rate: str, warmup: int, expected: dict[int, float]) -> None:
    adaptive = AdaptiveBatch(rate, warmup)
    assert {step: adaptive.factor(30, CHANGES, step) for step in expected} == pytest.approx(expected)


def test_a_second_rise_begins_where_the_first_has_come_to() -> None:
    adaptive, changes = AdaptiveBatch("linear", 9), (Change(0, 0, 6), Change(2, 12, 18), Change(4, 48, 30))
    factors = [adaptive.factor(30, changes, step) for step in range(16)]
    assert factors[:4] == pytest.approx([0.2, 0.2, 0.24, 0.28])
    assert factors[4] == pytest.approx(0.28 + 0.72 / 10)
    assert factors[12:] == pytest.approx([0.28 + 0.72 * 0.9, 1.0, 1.0, 1.0])


def test_what_does_not_go_with_it_is_named() -> None:
    with pytest.raises(UsageError, match=r"global batch \(31\) must be a multiple of micro_batch \(3\) times"):
        AdaptiveBatch("linear").batch(31, MICRO, 2, MOST)
    nothing = {"rollback": False, "audited": False, "late": False}
    assert refused_adaptive(**nothing) is None
    for name, said in {"rollback": "choose skip or stop", "audited": "audit", "late": "async"}.items():
        assert said in (refused_adaptive(**{**nothing, name: True}) or "")
    assert "scaling_policy: measured" in (refused_adaptive(**nothing, measured=True) or "")
    assert "stream" in (refused_adaptive(**nothing, streams=True) or "")
