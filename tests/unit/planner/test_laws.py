"""Compute-optimal sizes: the published check, the optimum against a search, and intervals that hold it."""

from __future__ import annotations

import pytest

from elastic.core.errors import UsageError
from elastic.planner.laws import BESIROGLU_2024, optimum, shape_of


def test_the_compute_of_chinchilla_gives_about_its_size() -> None:
    best = optimum(5.76e23)
    assert best.parameters == pytest.approx(72.2e9, rel=0.01)
    assert best.tokens == pytest.approx(1.33e12, rel=0.01)
    assert best.tokens / best.parameters == pytest.approx(18.4, abs=0.1)
    assert BESIROGLU_2024.optimal_exponent == pytest.approx(0.5126, abs=1e-4)


@pytest.mark.parametrize("flops", [1e18, 1e21, 5.76e23, 1e26])
def test_no_other_size_has_a_lower_loss(flops: float) -> None:
    best = optimum(flops)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        parameters = best.parameters * factor
        assert BESIROGLU_2024.loss(parameters, flops / 6 / parameters) > best.loss


@pytest.mark.parametrize("flops", [1e18, 1e21, 5.76e23, 1e26])
def test_the_flat_interval_ends_where_the_loss_has_risen_by_the_tolerance(flops: float) -> None:
    best = optimum(flops, tolerance=0.02)
    for parameters in best.flat:
        assert BESIROGLU_2024.loss(parameters, flops / 6 / parameters) == pytest.approx(best.loss + 0.02, abs=1e-6)
    assert best.flat[0] < best.parameters < best.flat[1]


def test_the_interval_of_the_exponent_widens_away_from_the_runs() -> None:
    widths = [optimum(flops).likely[1] / optimum(flops).likely[0] for flops in (1e21, 1e23, 1e25)]
    assert widths == sorted(widths)
    assert 1.0 < widths[0] < widths[2]


@pytest.mark.parametrize("parameters", [1e8, 1e9, 7e9, 72e9, 1e12])
def test_a_shape_has_about_the_parameters_that_were_asked_for(parameters: float) -> None:
    assert shape_of(parameters).parameters == pytest.approx(parameters, rel=0.06)


@pytest.mark.parametrize("flops", [0.0, -1.0, 1e31, float("nan")])
def test_flops_that_nobody_measured_are_refused(flops: float) -> None:
    with pytest.raises(UsageError, match="between 1e17 and 1e30"):
        optimum(flops)
