"""Collective times, and links fitted from a few sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import UsageError
from elastic.planner.links import Link, fit_link, p_norm, steps, wire_bytes


@pytest.mark.parametrize(
    ("operation", "sent", "latencies"),
    [
        ("all_reduce", 14.0, 14),
        ("all_gather", 7.0, 7),
        ("reduce_scatter", 7.0, 7),
        ("all_to_all", 7.0, 7),
        ("send", 8.0, 1),
    ],
)
def test_volumes_and_steps_of_ring_algorithms(operation: str, sent: float, latencies: int) -> None:
    assert wire_bytes(operation, 8, 8.0) == sent
    assert steps(operation, 8) == latencies


def test_an_all_reduce_across_many_nodes_takes_a_tree() -> None:
    assert steps("all_reduce", 1024, 8) == 2 * (7 + 7)
    assert steps("all_gather", 1024, 8) == 1023


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3), st.floats(1, 20))
def test_the_knee_lies_between_the_larger_and_the_sum(one: float, other: float, knee: float) -> None:
    merged = p_norm(one, other, knee)
    assert max(one, other) * 0.999999 <= merged <= (one + other) * 1.000001


@pytest.mark.parametrize("knee", [None, 1.0, 2.0])
@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all", "send"])
def test_alpha_and_beta_are_found_from_noisy_times(operation: str, knee: float | None) -> None:
    real, ranks = Link(20e-6, 1 / 40e9, 1.5 if knee is None else knee), 8
    noise = (1.03, 0.97, 1.02, 0.98, 1.01, 1.0, 0.99)
    sizes = [2 ** (12 + 3 * i) for i in range(7)]
    times = [
        real.seconds(steps(operation, ranks), wire_bytes(operation, ranks, size)) * factor
        for size, factor in zip(sizes, noise, strict=True)
    ]
    found = fit_link(operation, ranks, list(zip(sizes, times, strict=True)), knee)
    assert found.alpha_s == pytest.approx(real.alpha_s, rel=0.1)
    assert found.beta_s_per_byte == pytest.approx(real.beta_s_per_byte, rel=0.1)


def test_one_slow_measurement_does_not_bend_the_link() -> None:
    real = Link(10e-6, 1 / 25e9)
    measured = [(size, real.seconds(1, size)) for size in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)]
    measured[3] = (measured[3][0], measured[3][1] * 20)
    found = fit_link("send", 2, [(int(size), time) for size, time in measured], 1.0)
    assert found.beta_s_per_byte == pytest.approx(real.beta_s_per_byte, rel=0.05)
    assert found.alpha_s == pytest.approx(real.alpha_s, rel=0.05)


@pytest.mark.parametrize("measured", [[], [(1000, 1e-3)], [(1000, 1e-3), (2000, 0.0)]])
def test_too_little_is_refused(measured: list[tuple[int, float]]) -> None:
    with pytest.raises(UsageError, match="sizes and times above zero"):
        fit_link("send", 2, measured, 1.0)
