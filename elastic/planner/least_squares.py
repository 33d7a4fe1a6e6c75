"""Robust least squares in relative error for a handful of positive constants, without numpy.

Residuals are log(predicted / measured), so a factor of two costs the same in microseconds and in minutes. Ordinary
least squares over sizes from 1 MB to 8 GB fits the largest only. The loss is pseudo-Huber: one slow node in a set of
measurements does not bend the rest. Constants are fitted as logarithms around priors, which decide what the
measurements leave open. Levenberg-Marquardt (Marquardt 1963) on the residuals that the loss has scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Predict = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class Prior:
    """What is known of a constant before anything is measured: about `value`, give or take a factor e^`spread`."""

    value: float
    spread: float


def fit_relative(
    predict: Predict, measured: Sequence[float], priors: Sequence[Prior], noise: float = 0.08, rounds: int = 40
) -> tuple[float, ...]:
    """The constants under which `predict(constants)` comes closest to `measured`, all of them positive.

    `noise` is the relative error of one measurement that is still ordinary; larger ones weigh less than their square.
    """

    def residuals(logs: Sequence[float]) -> list[float]:
        predicted = predict([math.exp(log) for log in logs])
        ratios = (math.log(p / m) / noise for p, m in zip(predicted, measured, strict=True))
        known = ((log - math.log(prior.value)) / prior.spread for log, prior in zip(logs, priors, strict=True))
        return [*(_pseudo_huber(ratio) for ratio in ratios), *known]

    logs = [math.log(prior.value) for prior in priors]
    here = residuals(logs)
    damping = 1e-2
    for _ in range(rounds):
        jacobian = _jacobian(residuals, logs, here)
        while damping < 1e8:
            step = _solve(jacobian, here, damping)
            there = [log + change for log, change in zip(logs, step, strict=True)]
            after = residuals(there)
            if _square(after) < _square(here):
                break
            damping *= 4
        else:
            break
        gained = 1 - _square(after) / _square(here)
        logs, here, damping = there, after, max(damping / 6, 1e-9)
        if gained < 1e-7:
            break
    return tuple(math.exp(log) for log in logs)


def _pseudo_huber(ratio: float) -> float:
    """Its square is a pseudo-Huber loss: ratio^2 near zero, 2 |ratio| far away."""
    return math.copysign(math.sqrt(2 * (math.sqrt(1 + ratio * ratio) - 1)), ratio)


def _square(residuals: Sequence[float]) -> float:
    return sum(residual * residual for residual in residuals)


def _jacobian(
    residuals: Callable[[Sequence[float]], list[float]], logs: Sequence[float], here: Sequence[float]
) -> list[list[float]]:
    """By forward differences; one row per constant."""
    rows, width = [], 1e-5
    for i in range(len(logs)):
        beside = residuals([log + (width if i == j else 0.0) for j, log in enumerate(logs)])
        rows.append([(b - h) / width for b, h in zip(beside, here, strict=True)])
    return rows


def _solve(jacobian: Sequence[Sequence[float]], here: Sequence[float], damping: float) -> list[float]:
    """The damped normal equations, by Gaussian elimination with pivoting: there are ten unknowns at most."""
    size = len(jacobian)
    rows = [
        [sum(a * b for a, b in zip(one, other, strict=True)) for other in jacobian]
        + [-sum(a * b for a, b in zip(one, here, strict=True))]
        for one in jacobian
    ]
    for i in range(size):
        rows[i][i] *= 1 + damping
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for row in range(i + 1, size):
            factor = rows[row][i] / rows[i][i]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
