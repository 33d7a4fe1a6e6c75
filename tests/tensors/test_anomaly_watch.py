"""When a step counts as an anomaly, and what a state says about the samples that are left out. Without DeepSpeed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings
from elastic.training.anomalies import AnomalyWatch
from elastic.training.data import cursor


def engine(norm: float | None = 1.0, applied: bool = True, scaler: Any = None) -> Any:
    optimizer = SimpleNamespace(_global_grad_norm=norm, loss_scaler=scaler)
    made = SimpleNamespace(optimizer=optimizer, norm=norm, applied=applied)
    made.fp16_enabled = lambda: scaler is not None
    made.get_global_grad_norm = lambda: made.norm
    made.was_step_applied = lambda: made.applied
    return made


@pytest.mark.parametrize("norm", [-1.0, math.inf, math.nan])
def test_a_norm_that_is_no_number_is_found_whatever_the_own_loss_is(norm: float) -> None:
    watch = AnomalyWatch(engine(norm), AnomalySettings())
    assert str(watch.found(0.5)) == "the gradient is not finite"
    assert str(watch.found(math.nan)) == "the loss is nan"
    assert AnomalyWatch(engine(0.0), AnomalySettings()).found(0.5) is None


def test_a_loss_that_is_no_number_makes_the_gradient_none_either() -> None:
    watch = AnomalyWatch(engine(), AnomalySettings())
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.tensor(3.0, dtype=dtype, requires_grad=True)
        good = watch.guarded(weight * 2.0, 0.3)
        assert good.dtype is dtype
        assert good == weight.detach() * 2.0 * 0.3, "a good loss is changed"
        watch.guarded(weight * 2.0 + math.inf, 0.3).backward()
        assert weight.grad is not None
        assert weight.grad.isnan()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose loss is all that there is to tell."""
    monkeypatch.setattr(AnomalyWatch, "_told", lambda self, own_loss: not math.isfinite(own_loss))


def scaler(**more: Any) -> Any:
    return SimpleNamespace(
        **{"dynamic": True, "cur_scale": 1.0, "min_scale": 1.0, "raise_error_at_min_scale": True, **more}
    )


@pytest.mark.usefixtures("alone")
def test_an_overflow_in_fp16_is_none_unless_the_scale_cannot_be_lowered() -> None:
    searching = engine(math.inf, applied=False, scaler=scaler(cur_scale=1024.0))
    watch = AnomalyWatch(searching, AnomalySettings(max_overflows=2))
    assert [watch.found(1.0) for _ in range(20)] == [None] * 20
    searching.optimizer.loss_scaler.cur_scale = 1.0
    assert [watch.found(1.0) for _ in range(2)] == [None] * 2
    assert "the loss scale is 1, as low as it may be, and 3 steps in a row" in str(watch.found(1.0))


@pytest.mark.usefixtures("alone")
def test_a_step_that_was_applied_ends_the_row_of_overflows() -> None:
    at_floor = engine(math.inf, applied=False, scaler=scaler())
    watch = AnomalyWatch(at_floor, AnomalySettings(max_overflows=2))
    assert not at_floor.optimizer.loss_scaler.raise_error_at_min_scale, "DeepSpeed would end the run at the first one"
    for _ in range(5):
        at_floor.norm, at_floor.applied = math.inf, False
        assert watch.found(1.0) is None
        assert watch.found(1.0) is None
        at_floor.norm, at_floor.applied = 1.0, True
        assert watch.found(1.0) is None


@pytest.mark.usefixtures("alone")
def test_a_static_scale_cannot_be_lowered_at_all() -> None:
    watch = AnomalyWatch(
        engine(math.inf, False, scaler(dynamic=False, cur_scale=128.0)), AnomalySettings(max_overflows=0)
    )
    assert watch.found(1.0) is not None


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_no_number_is_no_overflow() -> None:
    searching = engine(math.inf, applied=False, scaler=scaler(cur_scale=1024.0))
    watch = AnomalyWatch(searching, AnomalySettings())
    assert watch.found(1.0) is None
    assert str(watch.found(math.nan)) == "the loss is nan"
    searching.norm, searching.applied = 1.0, True
    assert watch.found(1.0) is None


def test_a_rank_with_a_good_loss_learns_of_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnomalyWatch, "_told", lambda self, own_loss: True)
    watch = AnomalyWatch(engine(math.inf, applied=False, scaler=scaler(cur_scale=1024.0)), AnomalySettings())
    assert str(watch.found(1.0)) == "the loss is not finite on another rank"


# --- where a state stands --------------------------------------------------------------------------------------------

BATCH = BatchSettings(epochs=1)


def plan(skips: tuple[tuple[int, int], ...] = (), size: int = 57) -> StepPlan:
    made = StepPlan(10, 2, 1, 0, dataset_size=size, total_samples=size, passes=5)
    return cursor.skipping(made, skips, BATCH)


def test_an_epoch_has_fewer_samples_a_number_of_steps_has_not() -> None:
    assert (plan(((20, 30),)).total_samples, plan(((20, 30),)).last_step) == (47, 5)
    assert plan(((50, 57),)).last_step == 5
    steps = cursor.skipping(plan(), ((20, 30),), BatchSettings(max_steps=6))
    assert (steps.total_samples, steps.positions(5)) == (60, (60, 70))
    assert [plan(((20, 30),), size=30).epoch(step) for step in (0, 1)] == [0, 0]
    assert cursor.skipping(plan(size=30), ((20, 30),), BatchSettings(epochs=2)).epoch(2) == 1


def test_a_state_tells_what_it_has_left_out_and_the_next_run_does_too() -> None:
    before = plan(((20, 30),))
    told = cursor.told(before, seed=3, step=4)
    assert (told["position"], told["skips"]) == (50, [[20, 30]])
    assert cursor.resumed(told, plan(), BATCH) == before
    # What was left out after the state was saved is added to it.
    assert cursor.resumed(told, plan(((20, 30), (50, 57))), BATCH) == plan(((20, 30), (50, 57)))
    # Two that touch are one range by now, of which the state knew the first.
    between = cursor.told(plan(((20, 30),)), seed=3, step=2)
    assert cursor.resumed(between, plan(((20, 40),)), BATCH) == plan(((20, 40),))


def test_a_state_behind_what_is_left_out_is_refused() -> None:
    told = cursor.told(plan(), seed=3, step=3)
    with pytest.raises(IntegrityError, match=r"after step 3 was trained on samples 20 to 29"):
        cursor.resumed(told, plan(((20, 30),)), BATCH)
    assert cursor.resumed(cursor.told(plan(), 3, 2), plan(((20, 30),)), BATCH) == plan(((20, 30),))


def test_another_order_of_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="seed 3, this run has 4"):
        cursor.check(cursor.told(plan(), seed=3, step=3), plan(), seed=4)
