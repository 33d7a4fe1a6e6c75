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
from elastic.engines.base import StepOutcome
from elastic.engines.deepspeed.nonfinite import NonFinite
from elastic.training.data import cursor
from elastic.training.result import BadStep
from elastic.training.watch.anomalies import AnomalyWatch


def engine(norm: float | None = 1.0, applied: bool = True, scaler: Any = None) -> Any:
    optimizer = SimpleNamespace(_global_grad_norm=norm, loss_scaler=scaler)
    made = SimpleNamespace(optimizer=optimizer, norm=norm, applied=applied, module=torch.nn.Identity())
    made.fp16_enabled = lambda: scaler is not None
    made.get_global_grad_norm = lambda: made.norm
    made.was_step_applied = lambda: made.applied
    return made


class Watch:
    """The watch over what the DeepSpeed adapter reports of `native`. `elsewhere`: another rank's loss is non-finite."""

    def __init__(self, native: Any, max_overflows: int = 10, elsewhere: bool = False) -> None:
        self.native, self.seen = native, NonFinite(native, "rollback")
        adapter: Any = SimpleNamespace(module=native.module, judged=self.seen.judged)
        ranks: Any = SimpleNamespace(any=lambda flag: flag or elsewhere)
        self.watch = AnomalyWatch(adapter, AnomalySettings(max_overflows=max_overflows), ranks)

    def found(self, own_loss: float) -> BadStep | None:
        outcome = StepOutcome(self.native.applied, self.seen.grad_norm, (), self.seen.loss_scale())
        return self.watch.found(own_loss, outcome)


@pytest.mark.parametrize("norm", [-1.0, math.inf, math.nan])
def test_a_non_finite_norm_is_found_whatever_the_own_loss_is(norm: float) -> None:
    watch = Watch(engine(norm))
    assert str(watch.found(0.5)) == "the gradient is not finite"
    assert str(watch.found(math.nan)) == "the loss is nan"
    assert Watch(engine(0.0)).found(0.5) is None


def test_without_a_norm_the_ranks_tell_each_other_of_their_losses() -> None:
    assert Watch(engine(None)).found(0.5) is None
    assert str(Watch(engine(None)).found(math.inf)) == "the loss is inf"
    assert str(Watch(engine(None), elsewhere=True).found(0.5)) == "the gradient is not finite"


def test_a_non_finite_loss_yields_a_non_finite_gradient() -> None:
    watch = Watch(engine()).watch
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.tensor(3.0, dtype=dtype, requires_grad=True)
        good = watch.guarded(weight * 2.0, 0.3)
        assert good.dtype is dtype
        assert good == weight.detach() * 2.0 * 0.3, "a good loss is changed"
        watch.guarded(weight * 2.0 + math.inf, 0.3).backward()
        assert weight.grad is not None
        assert weight.grad.isnan()


def scaler(**more: Any) -> Any:
    return SimpleNamespace(
        **{"dynamic": True, "cur_scale": 1.0, "min_scale": 1.0, "raise_error_at_min_scale": True, **more}
    )


def test_an_overflow_in_fp16_is_no_anomaly_unless_the_scale_cannot_be_lowered() -> None:
    searching = engine(math.inf, applied=False, scaler=scaler(cur_scale=1024.0))
    watch = Watch(searching, max_overflows=2)
    assert [watch.found(1.0) for _ in range(20)] == [None] * 20
    searching.optimizer.loss_scaler.cur_scale = 1.0
    assert [watch.found(1.0) for _ in range(2)] == [None] * 2
    assert "the loss scale is 1, as low as it may be, and 3 steps in a row" in str(watch.found(1.0))


def test_a_step_that_was_applied_ends_the_row_of_overflows() -> None:
    at_floor = engine(math.inf, applied=False, scaler=scaler())
    watch = Watch(at_floor, max_overflows=2)
    assert not at_floor.optimizer.loss_scaler.raise_error_at_min_scale, "DeepSpeed would end the run at the first one"
    for _ in range(5):
        at_floor.norm, at_floor.applied = math.inf, False
        assert watch.found(1.0) is None
        assert watch.found(1.0) is None
        at_floor.norm, at_floor.applied = 1.0, True
        assert watch.found(1.0) is None


def test_a_static_scale_cannot_be_lowered_at_all() -> None:
    watch = Watch(engine(math.inf, False, scaler(dynamic=False, cur_scale=128.0)), max_overflows=0)
    assert watch.found(1.0) is not None


def test_a_non_finite_loss_is_no_overflow() -> None:
    searching = engine(math.inf, applied=False, scaler=scaler(cur_scale=1024.0))
    watch = Watch(searching)
    assert watch.found(1.0) is None
    assert str(watch.found(math.nan)) == "the loss is nan"
    searching.norm, searching.applied = 1.0, True
    assert watch.found(1.0) is None


def test_a_rank_with_a_good_loss_learns_of_another_ones() -> None:
    watch = Watch(engine(math.inf, applied=False, scaler=scaler(cur_scale=1024.0)), elsewhere=True)
    assert str(watch.found(1.0)) == "the loss is not finite on another rank"


# --- where a state stands --------------------------------------------------------------------------------------------

BATCH = BatchSettings(epochs=1)


def plan(skips: tuple[tuple[int, int], ...] = (), size: int = 57) -> StepPlan:
    made = StepPlan(10, 2, 1, 0, dataset_size=size, total_samples=size, micro_steps=5)
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
    told = cursor.to_state(before, seed=3, step=4)
    assert (told["position"], told["skips"]) == (50, [[20, 30]])
    assert cursor.from_state(told, plan(), BATCH) == before
    # What was left out after the state was saved is added to it.
    assert cursor.from_state(told, plan(((20, 30), (50, 57))), BATCH) == plan(((20, 30), (50, 57)))
    # Two that touch are one range by now, of which the state knew the first.
    between = cursor.to_state(plan(((20, 30),)), seed=3, step=2)
    assert cursor.from_state(between, plan(((20, 40),)), BATCH) == plan(((20, 40),))


def test_a_state_behind_what_is_left_out_is_refused() -> None:
    told = cursor.to_state(plan(), seed=3, step=3)
    with pytest.raises(IntegrityError, match=r"after step 3 was trained on samples 20 to 29"):
        cursor.from_state(told, plan(((20, 30),)), BATCH)
    assert cursor.from_state(cursor.to_state(plan(), 3, 2), plan(((20, 30),)), BATCH) == plan(((20, 30),))


def test_another_order_of_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="seed 3, this run has 4"):
        cursor.validate(cursor.to_state(plan(), seed=3, step=3), plan(), seed=4)
