"""Step reports of several ranks as one: what a node's agent sends in the place of its ranks' own reports, and how those
of all ranks become a completed step.

The completed step is the same, to the last bit, however the ranks' reports were grouped: what is added up as a float,
or compared between ranks, stays one value per rank; only what any grouping adds up alike is folded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from elastic.core.data.collectives import CollectiveUse
from elastic.core.data.steps import RANKS_PER_METRIC, CompletedStep, Range, StepReport, join

_MODULUS = 1 << 64
_NUMBERS = {int, float}


# These two are tuples, which are read from a message in half of a dataclass's time: a run of 10,000 nodes has so many
# of them in each step.
class MetricValues(NamedTuple):
    """One metric of several ranks: `values[i]` is that of `ranks[i]`; a single value is that of all of them."""

    ranks: tuple[int, ...]
    values: tuple[Any, ...]

    @property
    def alike(self) -> bool:
        return len(self.values) == 1

    def pairs(self) -> Iterator[tuple[int, Any]]:
        return zip(self.ranks, self.values * len(self.ranks) if self.alike else self.values, strict=True)


class JoinedReports(NamedTuple):
    """The reports of `ranks` (ascending) of one step; see `StepReport`.

    `losses`, `data_wait_s`, `noncollective_s`, `energy_j`, `gradient_parts` and `slowed` have one value per rank, or
    none where every rank's is zero or empty. `learning_rates`, `collectives`, `sample_flops`, `audit` and `travel` are
    those of the lowest rank. The others are sums, joined ranges, or the largest value.
    """

    generation: int
    step: int
    ranks: tuple[int, ...]
    losses: tuple[float, ...]
    positions: tuple[Range, ...]
    samples: int
    duration_s: float
    data_wait_s: tuple[float, ...]
    noncollective_s: tuple[float, ...]
    energy_j: tuple[float, ...]
    gradient_parts: tuple[tuple[float, ...], ...]
    grad_norm: float | None
    learning_rates: tuple[float, ...]
    tokens: int
    save_stall_s: float
    anomaly: str
    skipped: tuple[Range, ...]
    metrics: Mapping[str, MetricValues]
    content: int
    collectives: tuple[CollectiveUse, ...]
    sample_flops: float
    audit: str
    slowed: tuple[str, ...] = ()
    travel: str = ""


def joined(reports: Iterable[StepReport]) -> JoinedReports:
    """Reports of one step of one generation, at least one, each of another rank."""
    ordered = sorted(reports, key=attrgetter("rank"))
    lowest, ranks = ordered[0], tuple([report.rank for report in ordered])
    return JoinedReports(
        generation=lowest.generation,
        step=lowest.step,
        ranks=ranks,
        losses=_by_rank(ordered, "loss"),
        positions=join(position for report in ordered for position in report.positions),
        samples=sum(report.samples for report in ordered),
        duration_s=max(report.duration_s for report in ordered),
        data_wait_s=_by_rank(ordered, "data_wait_s"),
        noncollective_s=_by_rank(ordered, "noncollective_s"),
        energy_j=_by_rank(ordered, "energy_j"),
        gradient_parts=_by_rank(ordered, "gradient_parts"),
        grad_norm=_largest_norm(report.grad_norm for report in ordered),
        learning_rates=lowest.learning_rates,
        tokens=sum(report.tokens for report in ordered),
        save_stall_s=max(report.save_stall_s for report in ordered),
        anomaly=_best_known(report.anomaly for report in ordered),
        skipped=join(position for report in ordered for position in report.skipped),
        metrics=_metrics(ordered, ranks),
        content=sum(report.content for report in ordered) % _MODULUS,
        collectives=lowest.collectives,
        sample_flops=lowest.sample_flops,
        audit=lowest.audit,
        slowed=_by_rank(ordered, "slowed"),
        travel=lowest.travel,
    )


def joined_by_step(reports: Iterable[StepReport]) -> tuple[JoinedReports, ...]:
    """Any reports, oldest generation and step first. Of two by the same rank of the same step the first one counts."""
    place = attrgetter("generation", "step")
    groups = groupby(sorted(reports, key=place), place)
    return tuple(joined({report.rank: report for report in reversed(list(group))}.values()) for _, group in groups)


def merged(parts: Sequence[JoinedReports]) -> JoinedReports:
    """The reports of all these parts, at least one, of one step of one generation; no rank is in two of them. The same
    as `joined` makes of all their ranks' reports."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: part.ranks[0])
    lowest, ranks = parts[0], [part.ranks for part in parts]
    everybody = tuple(sorted(chain.from_iterable(ranks)))
    places = {rank: place for place, rank in enumerate(everybody)}
    places_of = [tuple([places[rank] for rank in part]) for part in ranks]

    def column(name: str, missing: Any) -> tuple[Any, ...]:
        values = [getattr(part, name) for part in parts]
        return tuple(_column(places_of, values, missing)) if any(values) else ()

    return lowest._replace(
        ranks=everybody,
        losses=column("losses", 0.0),
        positions=join(position for part in parts for position in part.positions),
        samples=sum(part.samples for part in parts),
        duration_s=max(part.duration_s for part in parts),
        data_wait_s=column("data_wait_s", 0.0),
        noncollective_s=column("noncollective_s", 0.0),
        energy_j=column("energy_j", 0.0),
        gradient_parts=column("gradient_parts", ()),
        grad_norm=_largest_norm(part.grad_norm for part in parts),
        tokens=sum(part.tokens for part in parts),
        save_stall_s=max(part.save_stall_s for part in parts),
        anomaly=_best_known(part.anomaly for part in parts),
        skipped=join(position for part in parts for position in part.skipped),
        metrics={name: _merged_values(found, everybody) for name, found in _by_name(parts).items()},
        content=sum(part.content for part in parts) % _MODULUS,
        slowed=column("slowed", ""),
    )


def completed(parts: Sequence[JoinedReports], first: bool) -> CompletedStep:
    """The step of which these are the reports of all ranks, each once. `first`: of its generation."""
    parts = sorted(parts, key=lambda part: part.ranks[0])
    lowest = parts[0]
    ranks = [part.ranks for part in parts]
    losses = _column(ranks, [part.losses for part in parts], 0.0)
    noncollective_s = _column(ranks, [part.noncollective_s for part in parts], 0.0)
    data_wait_s = _column(ranks, [part.data_wait_s for part in parts], 0.0)
    energy_j = _column(ranks, [part.energy_j for part in parts], 0.0)
    slowed = _column(ranks, [part.slowed for part in parts], "")
    metrics, metrics_by_rank = _reduced(parts)
    return CompletedStep(
        generation=lowest.generation,
        step=lowest.step,
        first=first,
        loss=sum(losses),
        positions=join(position for part in parts for position in part.positions),
        samples=sum(part.samples for part in parts),
        duration_s=max(part.duration_s for part in parts),
        data_wait_s=max(data_wait_s),
        save_stall_s=max(part.save_stall_s for part in parts),
        tokens=sum(part.tokens for part in parts),
        grad_norm=_largest_norm(part.grad_norm for part in parts),
        learning_rates=lowest.learning_rates,
        anomaly=_best_known(part.anomaly for part in parts),
        skipped=join(position for part in parts for position in part.skipped),
        noncollective_s=tuple(noncollective_s),
        straggler_s=_excess(noncollective_s, data_wait_s),
        metrics=metrics,
        metrics_by_rank=metrics_by_rank,
        content=sum(part.content for part in parts) % _MODULUS,
        collectives=lowest.collectives,
        gradient_parts=_summed(_column(ranks, [part.gradient_parts for part in parts], ())),
        sample_flops=lowest.sample_flops,
        audit=lowest.audit,
        energy_j=sum(energy_j) if all(energy_j) else 0.0,
        slowed=tuple(slowed) if any(slowed) else (),
        travel=lowest.travel,
    )


def _by_rank(reports: Sequence[StepReport], name: str) -> tuple[Any, ...]:
    values = tuple(map(attrgetter(name), reports))
    return values if any(values) else ()


def _column(ranks_of: Sequence[tuple[int, ...]], values_of: Sequence[tuple[Any, ...]], missing: Any) -> list[Any]:
    """The values of all ranks in their order, from those of the parts."""
    column = [missing] * sum(map(len, ranks_of))
    if any(values_of):
        for ranks, values in zip(ranks_of, values_of, strict=True):
            # Those of a node mostly follow each other.
            if values and ranks[-1] - ranks[0] == len(ranks) - 1:
                column[ranks[0] : ranks[-1] + 1] = values
            elif values:
                for rank, value in zip(ranks, values, strict=True):
                    column[rank] = value
    return column


def _largest_norm(norms: Iterable[float | None]) -> float | None:
    """DeepSpeed reports a non-finite norm as -1: one rank that saw it is enough."""
    known = [norm for norm in norms if norm is not None]
    return -1.0 if any(norm < 0 for norm in known) else max(known, default=None)


def _best_known(anomalies: Iterable[str]) -> str:
    """A rank with a non-finite loss says so; the others know the gradient only."""
    return max(anomalies, key=lambda text: (bool(text), "loss" in text, text))


def _metrics(reports: Sequence[StepReport], ranks: tuple[int, ...]) -> dict[str, MetricValues]:
    by_name: dict[str, dict[int, Any]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            by_name.setdefault(str(name), {})[report.rank] = value
    return {name: _values(by_rank, ranks) for name, by_rank in by_name.items()}


def _values(by_rank: Mapping[int, Any], everybody: tuple[int, ...]) -> MetricValues:
    values = tuple(by_rank.values())
    # Where it is the same tuple, a message has it once.
    ranks = everybody if len(values) == len(everybody) else tuple(by_rank)
    alike = len(set(map(repr, values))) == 1
    return MetricValues(ranks, values[:1] if alike else values)


def _merged_values(found: Sequence[MetricValues], everybody: tuple[int, ...]) -> MetricValues:
    if _all_alike(found):
        pairs = dict.fromkeys(sorted(chain.from_iterable(values.ranks for values in found)), found[0].values[0])
    else:
        pairs = dict(sorted((pair for values in found for pair in values.pairs()), key=lambda pair: pair[0]))
    return _values(pairs, everybody)


def _by_name(parts: Sequence[JoinedReports]) -> dict[str, list[MetricValues]]:
    """`parts` are in the order of their lowest ranks."""
    by_name: dict[str, list[MetricValues]] = {}
    for part in parts:
        for name, values in part.metrics.items():
            by_name.setdefault(name, []).append(values)
    for found in by_name.values():
        # The lowest rank of a part may not have reported it.
        found.sort(key=lambda values: values.ranks[0])
    return by_name


def _reduced(parts: Sequence[JoinedReports]) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """(`metrics`, `metrics_by_rank`) of `CompletedStep`; `parts` are in the order of their lowest ranks."""
    by_name = _by_name(parts)
    reduced = {name: _mean(found) for name, found in by_name.items()}
    differing = {name: _of_lowest_ranks(found) for name, found in by_name.items() if not _all_alike(found)}
    return reduced, differing


def _all_alike(found: Sequence[MetricValues]) -> bool:
    text = repr(found[0].values[0])
    return all(values.alike and repr(values.values[0]) == text for values in found)


def _of_lowest_ranks(found: Sequence[MetricValues]) -> dict[int, Any]:
    pairs: list[tuple[int, Any]] = []
    for values in found:
        if len(pairs) >= RANKS_PER_METRIC and values.ranks[0] > pairs[RANKS_PER_METRIC - 1][0]:
            break
        pairs = sorted([*pairs, *values.pairs()], key=lambda pair: pair[0])
    return dict(pairs[:RANKS_PER_METRIC])


def _mean(found: Sequence[MetricValues]) -> Any:
    """The mean of the numbers among them; where there are none, the value of the lowest rank."""
    numbers: list[float] = []
    for values in found:
        if values.alike:
            numbers += [values.values[0]] * len(values.ranks) if _is_number(values.values[0]) else ()
        elif {*map(type, values.values)} <= _NUMBERS:
            numbers += values.values
        else:
            numbers += filter(_is_number, values.values)
    if not numbers:
        return found[0].values[0]
    if numbers.count(numbers[0]) == len(numbers):
        # Of the lowest rank that reported a number: an integer stays one.
        firsts = (next(filter(_has_number, values.pairs()), None) for values in found)
        return min((pair for pair in firsts if pair is not None), key=lambda pair: pair[0])[1]
    try:
        # Not rounded on the way: the order of the ranks makes no difference.
        return math.fsum(numbers) / len(numbers)
    except OverflowError:
        return math.fsum(number / len(numbers) for number in numbers)
    except ValueError:
        # Infinities of both signs.
        return math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_number(pair: tuple[int, Any]) -> bool:
    return _is_number(pair[1])


def _summed(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(math.fsum(column) for column in zip(*parts, strict=True)) if all(parts) else ()


def _excess(noncollective_s: Sequence[float], data_wait_s: Sequence[float]) -> float:
    if min(noncollective_s) <= 0.0:
        return 0.0
    # Waiting for data has its own owner.
    working = [own_s - wait_s for own_s, wait_s in zip(noncollective_s, data_wait_s, strict=True)]
    return max(working) - median(working)
