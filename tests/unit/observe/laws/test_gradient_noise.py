"""The estimator on gradients whose noise is known, the averages, their interval, and the journal as their state."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest

from elastic.observe.html.page import page
from elastic.observe.laws.gradient_noise import FEWEST, Estimate, _student, averaged, estimate, noise_scale
from elastic.observe.report import report
from elastic.observe.summary import summarize

# The true gradient, and the standard deviation of single samples' gradients about it, by coordinate.
GRADIENT, SPREADS = (0.3, -0.2, 0.1, 0.4), (0.5, 1.0, 1.5, 0.2)
SQUARE, TRACE = sum(g * g for g in GRADIENT), sum(s * s for s in SPREADS)


def step_of(number: int, sizes: Sequence[int], draw: random.Random, generation: int = 1) -> dict[str, Any]:
    """The record of a step whose micro-batches have these sizes, with gradients drawn sample by sample."""
    parts = []
    for size in sizes:
        samples = [[draw.gauss(g, s) for g, s in zip(GRADIENT, SPREADS, strict=True)] for _ in range(size)]
        parts.append([fmean(column) for column in zip(*samples, strict=True)])
    batch = sum(sizes)
    whole = [sum(size / batch * part[i] for size, part in zip(sizes, parts, strict=True)) for i in range(len(GRADIENT))]
    mean = sum(size / batch * sum(x * x for x in part) for size, part in zip(sizes, parts, strict=True))
    return {
        "step": number, "generation": generation, "samples": batch, "grad_norm": math.hypot(*whole),
        "gradient_parts": [float(len(sizes)), mean],
    }  # fmt: skip


def estimates(count: int, sizes: Sequence[int], seed: int) -> Iterator[Estimate]:
    draw = random.Random(seed)
    for number in range(1, count + 1):
        found = estimate(step_of(number, sizes, draw))
        assert found is not None
        yield found


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2, 2), (5, 4, 1), (8, 1)], ids=str)
def test_the_estimates_are_unbiased_for_any_cut_of_the_step(sizes: Sequence[int]) -> None:
    found = list(estimates(2000, sizes, seed=len(sizes)))
    for values, truth in (([one.noise for one in found], TRACE), ([one.gradient for one in found], SQUARE)):
        error = stdev(values) / math.sqrt(len(values))
        assert abs(fmean(values) - truth) < 4 * error
        assert error < truth / 5, "the samples say something"


def test_equal_gradients_have_no_noise() -> None:
    found = estimate({"step": 1, "samples": 8, "grad_norm": 3.0, "gradient_parts": [4, 9.0]})
    assert found == Estimate(1, 8, 0.0, 9.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_parts": [1, 9.0]}, {"gradient_parts": []}, {"gradient_parts": [4, None]}, {"grad_norm": None},
        {"grad_norm": -1.0}, {"samples": 0}, {"anomaly": "the loss is nan"},
    ],
    ids=str,
)  # fmt: skip
def test_steps_that_say_nothing(changed: dict[str, Any]) -> None:
    step = {"step": 1, "samples": 8, "grad_norm": 3.0, "gradient_parts": [4, 10.0]}
    assert estimate(step) is not None
    assert estimate(step | changed) is None


def test_the_averages_are_those_of_two_bias_corrected_emas() -> None:
    found = list(estimates(25, (3, 3, 3), seed=1))
    noise = gradient = 0.0
    for one in found:
        noise, gradient = 0.95 * noise + 0.05 * one.noise, 0.95 * gradient + 0.05 * one.gradient
    scale = averaged(found)
    assert scale is not None
    assert scale.noise == pytest.approx(noise / (1 - 0.95**25))
    assert scale.gradient == pytest.approx(gradient / (1 - 0.95**25))
    assert (scale.step, scale.measured, scale.global_batch) == (25, 25, 9)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    held = wide = 0
    for seed in range(200):
        scale = averaged(list(estimates(60, (8, 8, 8, 8), seed)))
        assert scale is not None
        if scale.low is None or scale.high is None:
            wide += 1
            continue
        assert scale.critical_batch is not None
        assert scale.low <= scale.critical_batch <= scale.high
        held += scale.low <= TRACE / SQUARE <= scale.high
    assert wide < 10
    # 95 % of those that have one; binomial deviations of 200 are 1.5 %, and the estimates are skewed.
    assert 0.89 < held / (200 - wide) < 0.99


def test_at_its_ends_the_interval_is_a_quantile_away_from_what_was_seen() -> None:
    """Fieller's definition, residual by residual: of averages that are correlated."""
    found = list(estimates(40, (4, 4, 4, 4), seed=2))
    scale = averaged(found)
    assert scale is not None
    assert scale.low is not None
    assert scale.high is not None
    for end in (scale.low, scale.high):
        at_its_end(found, end)


def at_its_end(found: Sequence[Estimate], end: float) -> None:
    weights = [0.95**age for age in reversed(range(len(found)))]
    weights = [weight / sum(weights) for weight in weights]
    spread = sum(weight * weight for weight in weights)
    residuals = [one.noise - end * one.gradient for one in found]
    mean = sum(w * r for w, r in zip(weights, residuals, strict=True))
    variance = sum(w * (r - mean) ** 2 for w, r in zip(weights, residuals, strict=True)) * spread / (1 - spread)
    assert abs(mean) == pytest.approx(_student(1 / spread - 1) * math.sqrt(variance))


def test_no_interval_before_there_is_enough() -> None:
    found = list(estimates(FEWEST, (16, 16, 16), seed=3))
    few, enough = averaged(found[:-1]), averaged(found)
    assert few is not None
    assert enough is not None
    assert few.critical_batch is None
    assert few.advice == f"no critical batch yet: {FEWEST - 1} measured steps, which are too few or too noisy"
    assert enough.critical_batch is not None


def test_a_gradient_that_is_not_told_from_zero_has_no_upper_end() -> None:
    found = [Estimate(n, 8, 4.0 + 0.1 * (n % 3), 1.0 if n % 2 else -0.9) for n in range(1, 41)]
    scale = averaged(found)
    assert scale is not None
    assert (scale.critical_batch, scale.high) == (None, None)
    assert scale.low is not None
    assert scale.low > 5.0
    at_its_end(found, scale.low)
    assert scale.advice == (
        "critical batch above 11 samples; this run uses 8, and 40 measured steps do not tell its gradient from the "
        "noise: there is no upper end"
    )
    neither = averaged([replace(one, noise=(-1) ** one.step) for one in found])
    assert neither is not None
    assert neither.low is None


def test_what_is_advised() -> None:
    scale = averaged([Estimate(number, 100, 300.0, 1.0 + 0.01 * (-1) ** number) for number in range(1, 101)])
    assert scale is not None
    assert scale.advice == (
        "critical batch about 300 samples (299 to 301); this run uses 100: "
        "4 times the fewest steps, 1.33 times the fewest samples"
    )


def test_students_quantile() -> None:
    # Of published tables.
    for freedom, quantile in ((9, 2.262), (15, 2.131), (38, 2.024), (200, 1.972)):
        assert _student(freedom) == pytest.approx(quantile, rel=5e-3)


def began(number: int, first: int) -> dict[str, Any]:
    return {"type": "generation", "number": number, "world_size": 3, "first_step": first, "time": 1.0}


def test_the_journal_is_the_state_of_the_averages() -> None:
    """Rolled back steps count once, in their last version, and another attempt or world size changes nothing."""
    draw = random.Random(4)
    steps = [step_of(number, (6, 6, 6), draw) for number in range(1, 31)]
    undisturbed = [began(1, 1), {"type": "steps", "steps": steps}]
    lost = [step_of(number, (6, 6, 6), draw) for number in range(18, 23)]
    disturbed = [
        {"type": "run", "status": "running", "run_id": "r", "time": 0.0},
        began(1, 1), {"type": "steps", "steps": [*steps[:17], *lost]},
        began(2, 18), {"type": "steps", "steps": steps[17:20]},
        {"type": "run", "status": "running", "run_id": "r", "time": 2.0},
        began(3, 21), {"type": "steps", "steps": steps[20:]},
    ]  # fmt: skip
    assert noise_scale(disturbed) == noise_scale(undisturbed)
    assert noise_scale([*undisturbed, began(2, 30)]) != noise_scale(undisturbed)


def test_the_advice_is_in_summary_report_and_page() -> None:
    draw = random.Random(5)
    steps = [{**step_of(number, (32, 32), draw), "time": 1.0} for number in range(1, 41)]
    records = [began(1, 1), {"type": "steps", "steps": steps}]
    summary = summarize(records)
    told = summary["gradient_noise"]["advice"]
    assert told.startswith("critical batch about ")
    assert f"gradient noise: {told}" in report(summary)
    assert told in page(records)
    assert summarize([began(1, 1)])["gradient_noise"] is None
    assert "critical batch" not in page([began(1, 1)])
