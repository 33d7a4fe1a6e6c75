"""Axes and lines of the report's charts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.observe.html.chart import Axis, line, rect, thinned

values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=1, max_size=20), st.integers(1, 12))
def test_an_axis_holds_all_values_and_its_ticks(found: list[float], most: int) -> None:
    axis = Axis.over(found, 300.0, 10.0)
    for value in found:
        assert 10.0 - 1e-6 <= axis(value) <= 300.0 + 1e-6
    ticks = axis.ticks(most)
    assert len(ticks) <= most + 1
    assert all(9.999 <= axis(tick) <= 300.001 for tick in ticks)
    assert ticks == sorted(ticks)


@pytest.mark.parametrize("found", [[], [3.0], [math.nan, math.inf], [2.0, 2.0]])
def test_an_axis_of_nothing_or_of_one_value_can_be_drawn(found: list[float]) -> None:
    axis = Axis.over(found, 0.0, 100.0)
    assert axis.low < axis.high
    assert axis.ticks()


@given(st.lists(values, min_size=50, max_size=400))
def test_thinning_keeps_the_extremes_and_the_order(found: list[float]) -> None:
    points = [(float(n), value) for n, value in enumerate(found)]
    kept = thinned(points, buckets=20)
    assert len(kept) <= 42
    assert kept == sorted(kept)
    assert min(kept, key=lambda p: p[1])[1] == min(found)
    assert max(kept, key=lambda p: p[1])[1] == max(found)


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    axis = Axis(0.0, 10.0, 0.0, 100.0)
    drawn = line([(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 4.0)], axis, axis, "loss")
    assert drawn.count("<polyline") == 2
    assert "nan" not in drawn


def test_titles_are_escaped() -> None:
    assert "<b>" not in rect(0, 0, 1, 1, "x", "<b>")
