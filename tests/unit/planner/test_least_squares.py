"""The fit: exact data are found again, priors fill what data leave open, outliers weigh little."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic.planner.least_squares import Prior, fit_relative

WHERE = (1.0, 2.0, 5.0, 20.0, 100.0)


def line(constants: Sequence[float]) -> list[float]:
    return [constants[0] + constants[1] * x for x in WHERE]


def test_constants_far_from_wide_priors_are_found() -> None:
    found = fit_relative(line, line([30.0, 0.2]), [Prior(1.0, 10.0), Prior(1.0, 10.0)])
    assert found == pytest.approx((30.0, 0.2), rel=1e-3)


def test_a_prior_decides_what_the_measurements_leave_open() -> None:
    found = fit_relative(line, line([1e-9, 3.0]), [Prior(0.01, 0.1), Prior(1.0, 3.0)])
    assert found[0] == pytest.approx(0.01, rel=0.2)
    assert found[1] == pytest.approx(3.0, rel=0.02)


def test_an_outlier_weighs_little() -> None:
    measured = line([5.0, 1.0])
    measured[2] *= 10
    found = fit_relative(line, measured, [Prior(3.0, 3.0), Prior(3.0, 3.0)], noise=0.02)
    assert found == pytest.approx((5.0, 1.0), rel=0.05)
