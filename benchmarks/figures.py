"""What was measured, as plain data: repetitions, the target they are held against, and why one is missing. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

REACHED, MISSED, WITHOUT_TARGET, NOT_MEASURED = "reached", "missed", "-", "not measured"


@dataclass(frozen=True)
class Target:
    """One bound on one statistic: "median" or "p95" or "max", at most (or at least) `bound`, in the figure's unit."""

    statistic: str
    bound: float
    at_most: bool = True

    def met(self, values: Sequence[float]) -> bool:
        value = statistic(values, self.statistic)
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{self.statistic} {'<=' if self.at_most else '>='} {self.bound:g}"


@dataclass(frozen=True)
class Figure:
    """One row of the table. `values` are the repetitions; `failure` says why there are none, or fewer than wanted.

    `subject` is what was measured (this project or a peer), `notes` say what differs from the other subjects, and
    `details` hold what belongs to the single repetitions: timelines of incidents, chosen cadence.
    """

    case: str
    name: str
    unit: str
    values: tuple[float, ...] = ()
    subject: str = "ray-elastic"
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if not self.values:
            return NOT_MEASURED
        if not self.targets:
            return WITHOUT_TARGET
        return REACHED if all(target.met(self.values) for target in self.targets) else MISSED

    def to_json(self) -> dict[str, Any]:
        """Exact: `from_json` of it is equal to self, the derived keys (summary, verdict) left aside."""
        return {**asdict(self), "summary": summary(self.values), "verdict": self.verdict}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        own = {key: value for key, value in data.items() if key not in ("summary", "verdict")}
        listed = {key: tuple(own[key]) for key in ("values", "notes")}
        return cls(**{**own, **listed, "targets": tuple(Target(**target) for target in own["targets"])})


def statistic(values: Sequence[float], name: str) -> float:
    """ "median", "min", "max", "mean", or "pNN" (nearest rank). ValueError for an empty sequence or another name."""
    if not values:
        raise ValueError(f"there is no {name} of no values")
    if name == "median":
        return statistics.median(values)
    if name == "mean":
        return statistics.fmean(values)
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    if name.startswith("p") and name[1:].isdecimal():
        rank = math.ceil(int(name[1:]) / 100 * len(values))
        return sorted(values)[max(0, rank - 1)]
    raise ValueError(f"{name!r} is no statistic")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Keys n, median, min, max, p95; only n for no values."""
    if not values:
        return {"n": 0}
    return {"n": len(values), **{name: statistic(values, name) for name in ("median", "min", "max", "p95")}}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The narrowest pair of the sorted values between which the true median lies with at least this confidence,
    whatever their distribution; None for too few values (below 6 at 0.95).

    The k-th smallest and the k-th largest of n miss it where fewer than k of n fair coins fall on one side: the sign
    test's interval (W. J. Conover, Practical Nonparametric Statistics, section 3.2).
    """
    count, ordered = len(values), sorted(values)
    best, outside = None, 0.0
    for k in range(1, count // 2 + 1):
        outside += 2 * math.comb(count, k - 1) / 2**count
        if 1 - outside < confidence:
            break
        best = (ordered[k - 1], ordered[count - k])
    return best


def not_measured(case: str, name: str, unit: str, reason: str, **more: Any) -> Figure:
    return Figure(case, name, unit, failure=reason, **more)


def ratio(case: str, name: str, over: Figure, under: Figure, target: Target | None = None) -> Figure:
    """The ratio of two medians as a figure of its own; not measured where one of them is not."""
    targets = () if target is None else (target,)
    missing = [figure.subject for figure in (over, under) if not figure.values]
    if missing:
        return not_measured(case, name, "x", f"not measured: {' and '.join(missing)}", targets=targets)
    value = statistic(over.values, "median") / statistic(under.values, "median")
    return Figure(case, name, "x", (value,), targets=targets, notes=("the ratio of the two medians",))
