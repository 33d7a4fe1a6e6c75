"""The planner's error on measured and published steps. The bounds are gates: a change that breaks one is not better."""

from __future__ import annotations

import random
from dataclasses import fields
from functools import lru_cache
from statistics import median

import pytest
from planner.published import SELENE, VTRAIN, Measured, errors, korthikanti, mape, regret, sc21, vtrain

from elastic.planner.cost_model import Constants, fit_constants
from elastic.planner.devices import DEVICES, Cluster


@lru_cache
def multi() -> tuple[Measured, ...]:
    return tuple(vtrain("multi"))


def pairs(rows: tuple[Measured, ...] | list[Measured]) -> list[tuple[object, float]]:
    return [(row.work, row.seconds) for row in rows]


@lru_cache
def without(size: float | None) -> Constants:
    """Fitted on vTrain's multi-node steps, without those of one hidden size."""
    return fit_constants(VTRAIN, pairs([row for row in multi() if row.case[2] != size]))


def test_the_default_constants_are_the_fit_on_vtrain() -> None:
    fitted = without(None)
    for one in fields(Constants):
        assert getattr(Constants(), one.name) == pytest.approx(getattr(fitted, one.name), rel=0.01)


def test_vtrain_in_sample() -> None:
    assert len(multi()) == 109
    assert mape(errors(VTRAIN, without(None), multi())) <= 0.07


def test_vtrain_leaving_one_model_size_out() -> None:
    found = []
    for size in {row.case[2] for row in multi()}:
        found += errors(VTRAIN, without(size), [row for row in multi() if row.case[2] == size])
    assert len(found) == 109
    assert mape(found) <= 0.12


def test_vtrain_regret_of_the_chosen_plan_for_a_size_that_was_not_measured() -> None:
    sizes = {row.case[2] for row in multi()}
    found = [regret(VTRAIN, without(size), [row for row in multi() if row.case[2] == size]) for size in sizes]
    assert median(found) <= 0.05
    assert max(found) <= 0.10


@pytest.mark.parametrize("seed", range(3))
def test_vtrain_single_node_from_twenty_measured_steps(seed: int) -> None:
    node, rows = Cluster(DEVICES["A100"], 1), vtrain("single")
    assert len(rows) == 1440
    random.Random(seed).shuffle(rows)
    constants = fit_constants(node, pairs(rows[:20]))
    assert mape(errors(node, constants, rows[20:])) <= 0.10
    cases: dict[tuple[float, ...], list[Measured]] = {}
    for row in rows[20:]:
        cases.setdefault(row.case, []).append(row)
    assert median(regret(node, constants, case) for case in cases.values()) <= 0.05


def test_megatron_sc21_with_constants_from_vtrain_alone() -> None:
    found = errors(SELENE, without(None), sc21())
    assert mape(found) <= 0.06
    assert max(map(abs, found)) <= 0.10


def test_korthikanti_table_5_with_constants_from_vtrain_alone() -> None:
    found = errors(SELENE, without(None), korthikanti())
    assert mape(found) <= 0.05
    assert max(map(abs, found)) <= 0.10
