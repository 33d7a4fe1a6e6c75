"""The data cursor of a restored state: samples that were left out since may move it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import IntegrityError
from elastic.training.data import cursor

PLAN = StepPlan(10, 3, 2, 0, dataset_size=370, total_samples=3700, micro_steps=2)
STEP = 7
ALONE: Any = SimpleNamespace(
    sums_later=lambda values: lambda: [cursor.whole_step(PLAN, PLAN.order(1), STEP)],
    any_and_unequal=lambda flags, values: ([bool(flag) for flag in flags], []),
)


def verified(saved: dict[str, Any], plan: StepPlan) -> None:
    agreement = ALONE
    agreement.sums_later = lambda values: lambda: [cursor.whole_step(plan, plan.order(1), STEP)]
    cursor.verify(saved, cursor.to_state(plan, 1, STEP), plan, plan.order(1), agreement)


@pytest.mark.parametrize("skips", [(), ((70, 80),), ((70, 80), (200, 230))])
def test_samples_left_out_since_then_move_what_comes_next(skips: tuple[tuple[int, int], ...]) -> None:
    verified(cursor.to_state(PLAN, 1, STEP), replace(PLAN, skips=skips))


def test_what_was_left_out_stays_left_out() -> None:
    then = replace(PLAN, skips=((20, 30), (100, 110)))
    verified(cursor.to_state(then, 1, STEP), then)
    verified(cursor.to_state(then, 1, STEP), replace(then, skips=((20, 30), (100, 110), (300, 310))))
    with pytest.raises(IntegrityError, match="position"):
        verified(cursor.to_state(then, 1, STEP), replace(PLAN, skips=((20, 30),)))


@pytest.mark.parametrize("off", [-10, -1, 1, 10])
def test_a_wrong_position_is_refused_also_where_samples_were_left_out_since(off: int) -> None:
    saved = cursor.to_state(PLAN, 1, STEP)
    with pytest.raises(IntegrityError, match="position"):
        verified({**saved, "position": saved["position"] + off}, replace(PLAN, skips=((200, 230),)))
