"""The gradient noise scale of a run, and the critical batch that it stands for: a fold over the journal's steps.

McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1: the squared norm of a gradient over b samples is in expectation
|G|^2 + tr(S)/b, with G the true gradient and S the covariance of single samples' gradients. Two batch sizes give
unbiased estimates of both. Here the small batches are a step's n micro-batches i, of share w_i of its B samples, and
the large one is the step. As the shares are b_i / B, sum(w_i |g_i|^2) is |G|^2 + tr(S) n/B in expectation, whatever the
micro-batches' sizes are. Hence, with Q that sum and P the squared norm of the step's gradient,

    tr(S) = B (Q - P) / (n - 1)        |G|^2 = (n P - Q) / (n - 1)

Neither depends on how many ranks there were. Each is averaged by itself, and the ratio is taken last: the mean of the
steps' ratios is another number.

The state of the averages is the journal: a run that resumes, or goes on at another size, continues with them, and steps
that were rolled back count in their last version only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

from elastic.core.wording import plural
from elastic.observe.records import Record
from elastic.observe.steps import final_steps
from elastic.observe.text import finite

# Of the averages, per measured step: they reach back over some forty of them.
_DECAY = 0.95
# Measured steps without which nothing is said.
FEWEST = 10
_QUANTILE = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """Of one step, unbiased: `noise` is the trace of the single samples' covariance, `gradient` the squared norm of the
    true gradient. Single steps' may be negative. `samples` is the step's batch."""

    step: int
    samples: int
    noise: float
    gradient: float


@dataclass(frozen=True)
class NoiseScale:
    """The averages after `step`, of `measured` steps. `critical_batch` is their ratio in samples, from `low` to `high`
    with 95 % confidence. All three are None while the steps are too few; while the gradient cannot be told from zero
    there is no more than `low`, if the noise can. `global_batch` is that of the last measured step."""

    step: int
    measured: int
    global_batch: int
    noise: float
    gradient: float
    critical_batch: float | None = None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name, and the advice."""
        return {**asdict(self), "advice": self.advice}

    @property
    def advice(self) -> str:
        """One sentence. McCandlish et al., section 2.4: a batch B takes 1 + B_crit/B times the fewest steps, and
        1 + B/B_crit times the fewest samples."""
        steps, batch = plural(self.measured, "measured step"), self.global_batch
        if self.low is None:
            return f"no critical batch yet: {steps}, which are too few or too noisy"
        if self.critical_batch is None or self.high is None:
            return (
                f"critical batch above {_count(self.low)} samples; this run uses {_count(batch)}, and {steps} do not "
                "tell its gradient from the noise: there is no upper end"
            )
        text = f"critical batch about {_count(self.critical_batch)} samples ({_count(self.low)} to {_count(self.high)})"
        text += f"; this run uses {_count(batch)}"
        if self.critical_batch <= 0.0:
            return text
        more_steps, more_samples = 1 + self.critical_batch / batch, 1 + batch / self.critical_batch
        return f"{text}: {more_steps:.3g} times the fewest steps, {more_samples:.3g} times the fewest samples"


def noise_scale(records: Iterable[Record]) -> NoiseScale | None:
    """Of the run's final timeline; None where no step was measured."""
    return averaged([found for step in final_steps(records) if (found := estimate(step)) is not None])


def estimate(step: Record) -> Estimate | None:
    """Of a step's record; None where it was not measured, was not applied, or has fewer than two micro-batches."""
    parts, norm, samples = step.get("gradient_parts"), finite(step.get("grad_norm")), step.get("samples")
    if not parts or norm is None or norm < 0.0 or not samples or step.get("anomaly"):
        return None
    count, mean = int(parts[0]), finite(parts[1])
    if count < 2 or mean is None:
        return None
    whole = norm * norm
    noise = samples * (mean - whole) / (count - 1)
    return Estimate(int(step["step"]), int(samples), noise, (count * whole - mean) / (count - 1))


def averaged(estimates: Sequence[Estimate]) -> NoiseScale | None:
    """Exponential moving averages, bias-corrected, over the estimates in the order of their steps."""
    if not estimates:
        return None
    weights = [_DECAY**age for age in reversed(range(len(estimates)))]
    total = math.fsum(weights)
    weights = [weight / total for weight in weights]
    pairs = [(one.noise, one.gradient) for one in estimates]
    noise, gradient = (math.fsum(w * pair[axis] for w, pair in zip(weights, pairs, strict=True)) for axis in (0, 1))
    last = estimates[-1]
    found = NoiseScale(last.step, len(estimates), last.samples, noise, gradient)
    ends = _interval(weights, pairs, noise, gradient) if len(estimates) >= FEWEST else None
    if ends is None:
        return found
    # Noise is never negative; its estimate may be.
    low, high = max(0.0, ends[0]), ends[1]
    if high is None:
        return replace(found, low=low)
    return replace(found, critical_batch=max(0.0, noise / gradient), low=low, high=max(0.0, high))


def _interval(
    weights: Sequence[float], pairs: Sequence[tuple[float, float]], noise: float, gradient: float
) -> tuple[float, float | None] | None:
    """Fieller's 95 % interval of noise / gradient, two averages that are correlated. Without an upper end where the
    gradient cannot be told from zero; None where the noise cannot either."""
    spread = math.fsum(weight * weight for weight in weights)

    def covariance(one: int, other: int) -> float:
        means = (noise, gradient)
        products = (
            weight * (pair[one] - means[one]) * (pair[other] - means[other])
            for weight, pair in zip(weights, pairs, strict=True)
        )
        return math.fsum(products) * spread / (1.0 - spread)

    t = _student(1.0 / spread - 1.0)
    # Of the R with (noise - R gradient)^2 = t^2 Var(noise - R gradient): a R^2 - 2 b R + c = 0.
    a = gradient * gradient - t * t * covariance(1, 1)
    b = noise * gradient - t * t * covariance(0, 1)
    c = noise * noise - t * t * covariance(0, 0)
    root = math.sqrt(max(0.0, b * b - a * c))
    if gradient > 0.0 and a > 0.0:
        return (b - root) / a, (b + root) / a
    # The set is what lies outside of the two roots, of which one is negative: no ratio can be. The other one is
    # (b - root) / a, in a form that a = 0 does not matter to.
    return (c / (b + root), None) if noise > 0.0 and c > 0.0 else None


def _student(freedom: float) -> float:
    """The two-sided 95 % quantile of Student's t: two terms of its expansion about the normal one (Abramowitz and
    Stegun 26.7.5), within 0.5 % from nine degrees of freedom on."""
    z = _QUANTILE
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
