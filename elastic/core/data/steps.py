"""Step reports of the ranks, and the table that joins them: a step that all ranks have reported is complete."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from elastic.core.data.collectives import CollectiveUse
from elastic.core.events import FirstStepDone
from elastic.core.typed_json import NOT_KEPT

Range = tuple[int, int]

# A record of a step keeps the values of at most this many ranks for each metric that differs between ranks.
RANKS_PER_METRIC = 32
_MODULUS = 1 << 64
_ALWAYS = ("step", "loss", "positions", "samples", "duration_s")
_WHERE_SET = ("tokens", "anomaly", "skipped", "metrics", "content", "grad_norm", "gradient_parts", "sample_flops")


@dataclass(frozen=True)
class StepReport:
    """One rank's report of one finished optimizer step, the same object from the training thread to the controller.

    `positions` are the half-open ranges of the global sample order that this rank consumed with non-zero weight.
    `loss` is this rank's part of the global mean: the sum over its micro-batches of loss * samples / step samples, so
    that the sum over ranks is the loss of the global batch. `grad_norm` is the engine's (None if it has none).
    `duration_s` ends with the optimizer step; `save_stall_s` is how long snapshots delayed the training thread: for
    this step after it, and for the previous one during it; on a device, how long they delayed its stream.
    `noncollective_s` is the part of `duration_s` that this rank did not spend in collectives (0.0: not measured).
    `anomaly` says why the step was not applied; `skipped` is then what it would have consumed.
    `metrics` is what the user attached with `elastic.report`.
    `content` stands for what was read from a stream (0: none): the sum over its readers, modulo 2**64.
    `collectives` are those of rank 0, empty on all others.
    `gradient_parts`, where the gradient noise was measured: (number of this rank's micro-batches, the sum of their
    share of the step's samples times the squared norm of their own gradient). A step's are the sums over the ranks.
    `sample_flops` are what the forward and backward pass of one sample takes, counted by rank 0 in the run's first step
    (0.0: not counted); negative where they were estimated. `energy_j` is what the rank's device has used since the
    report before (0.0: not measured).
    """

    step: int
    loss: float
    positions: tuple[Range, ...]
    samples: int
    duration_s: float
    data_wait_s: float = 0.0
    grad_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    tokens: int = 0
    save_stall_s: float = 0.0
    anomaly: str = ""
    skipped: tuple[Range, ...] = ()
    noncollective_s: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    content: int = 0
    collectives: tuple[CollectiveUse, ...] = ()
    gradient_parts: tuple[float, ...] = ()
    sample_flops: float = 0.0
    energy_j: float = 0.0
    generation: int = 0
    rank: int = 0

    def to_json(self) -> dict[str, Any]:
        """What travels with a snapshot: without place and most times, and without empty fields."""
        whole = {name: getattr(self, name) for name in (*_ALWAYS, *_WHERE_SET)}
        return {name: value for name, value in whole.items() if value or name in _ALWAYS}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], generation: int, rank: int) -> StepReport:
        """The inverse of `to_json`. Unknown keys are ignored. Raises KeyError or TypeError for anything else."""
        known: dict[str, Any] = {name: data[name] for name in (*_ALWAYS, *_WHERE_SET) if name in data}
        known |= {name: _ranges(known[name]) for name in ("positions", "skipped") if name in known}
        known |= {"gradient_parts": tuple(known.get("gradient_parts", ()))}
        return cls(**known, generation=generation, rank=rank)


@dataclass(frozen=True)
class CompletedStep:
    """A step that every rank has finished: sums over ranks, and the slowest rank's times.

    `positions` are joined half-open ranges of the global sample order; `loss` is the mean over the global batch.
    `anomaly` says why the step was not applied; `skipped` is then what it would have consumed.
    `noncollective_s[rank]` is the rank's time outside of collectives (0.0: not measured), `straggler_s` how much
    longer the slowest rank worked than the median, apart from waiting for data.
    `metrics` has one value per name: the mean over the ranks that reported a number; otherwise the value of the lowest
    rank that reported the name. `metrics_by_rank` has the single values of names whose values differ between ranks, of
    the lowest `RANKS_PER_METRIC` ranks.
    `content` is the sum over all readers of a stream, modulo 2**64: a step that is repeated must give the same.
    `collectives` are those of rank 0. `gradient_parts` and `energy_j` are sums over all ranks, empty or 0.0
    where one did not measure; `sample_flops` is rank 0's.
    """

    generation: int
    step: int
    first: bool
    loss: float
    positions: tuple[Range, ...]
    samples: int
    duration_s: float
    data_wait_s: float
    save_stall_s: float
    tokens: int
    grad_norm: float | None
    learning_rates: tuple[float, ...]
    anomaly: str = ""
    skipped: tuple[Range, ...] = ()
    noncollective_s: tuple[float, ...] = ()
    straggler_s: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_by_rank: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    content: int = 0
    collectives: tuple[CollectiveUse, ...] = ()
    gradient_parts: tuple[float, ...] = ()
    sample_flops: float = 0.0
    energy_j: float = 0.0

    @property
    def first_step_done(self) -> FirstStepDone | None:
        """The event for the state machine, when this is the generation's first complete step."""
        return FirstStepDone(self.generation, self.step) if self.first else None


@dataclass
class StepTable:
    """The reports of one generation, joined step by step. Reports of other generations are dropped."""

    # The generation that is being counted; -1 before the first.
    generation: int = -1
    _world_size: int = 0
    # Workers send again what is not complete.
    _reports: dict[int, dict[int, StepReport]] = field(default_factory=dict, metadata=NOT_KEPT)
    _done: set[int] = field(default_factory=set)
    _done_below: int = 0
    # The next complete step is reported to the state machine as the generation's first.
    _first: bool = True
    # The state machine knows of the first step.
    _first_known: bool = False

    def begin(self, generation: int, world_size: int, start_step: int = 0) -> None:
        """A generation of `world_size` ranks begins after `start_step` finished steps."""
        self.generation, self._world_size, self._done_below = generation, world_size, start_step + 1
        self._reports, self._done, self._first, self._first_known = {}, set(), True, False

    def add(self, report: StepReport) -> CompletedStep | None:
        """One rank's report of a finished step; the completed step when it was the last one missing.

        A second report of the same rank and step changes nothing: the first one counts.
        """
        if report.generation != self.generation or not 0 <= report.rank < self._world_size:
            return None
        if self._is_done(report.step):
            return None
        reports = self._reports.setdefault(report.step, {})
        reports.setdefault(report.rank, report)
        return self._complete(report.step) if len(reports) == self._world_size else None

    def known(self, step: int) -> None:
        """The journal has the completed step: further reports of it change nothing."""
        self._mark_done(step)

    def first_known(self, generation: int) -> None:
        """The state machine knows of the generation's first step. A step in the journal does not imply that: a
        controller may have ended between the two."""
        if generation == self.generation:
            self._first, self._first_known = False, True

    def restored(self) -> StepTable:
        """After a restart of the controller: a first step that the state machine did not get to know is reported with
        the next one."""
        self._first = not self._first_known
        return self

    def _mark_done(self, step: int) -> None:
        if not self._is_done(step):
            self._done.add(step)
        while self._done_below in self._done:
            self._done.remove(self._done_below)
            self._done_below += 1

    def _is_done(self, step: int) -> bool:
        return step < self._done_below or step in self._done

    def _complete(self, step: int) -> CompletedStep:
        first, self._first = self._first, False
        by_rank = self._reports.pop(step)
        reports = [by_rank[rank] for rank in sorted(by_rank)]
        self._mark_done(step)
        norms = [report.grad_norm for report in reports if report.grad_norm is not None]
        metrics, metrics_by_rank = _reduced(reports)
        return CompletedStep(
            generation=self.generation,
            step=step,
            first=first,
            loss=sum(report.loss for report in reports),
            positions=join(position for report in reports for position in report.positions),
            samples=sum(report.samples for report in reports),
            duration_s=max(report.duration_s for report in reports),
            data_wait_s=max(report.data_wait_s for report in reports),
            save_stall_s=max(report.save_stall_s for report in reports),
            tokens=sum(report.tokens for report in reports),
            # DeepSpeed reports a non-finite norm as -1: one rank that saw it is enough.
            grad_norm=-1.0 if any(norm < 0 for norm in norms) else max(norms, default=None),
            learning_rates=reports[0].learning_rates,
            # A rank with a non-finite loss says so; the others know the gradient only.
            anomaly=max((report.anomaly for report in reports), key=lambda text: (bool(text), "loss" in text)),
            skipped=join(position for report in reports for position in report.skipped),
            noncollective_s=tuple(report.noncollective_s for report in reports),
            straggler_s=_excess(reports),
            metrics=metrics,
            metrics_by_rank=metrics_by_rank,
            content=sum(report.content for report in reports) % _MODULUS,
            collectives=reports[0].collectives,
            gradient_parts=_summed([report.gradient_parts for report in reports]),
            sample_flops=reports[0].sample_flops,
            energy_j=sum(used) if all(used := [report.energy_j for report in reports]) else 0.0,
        )


def _reduced(reports: Sequence[StepReport]) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """(`metrics`, `metrics_by_rank`) of `CompletedStep`; `reports` are in the order of their ranks."""
    by_name: dict[str, dict[int, Any]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            by_name.setdefault(str(name), {})[report.rank] = value
    reduced = {name: _mean(list(values.values())) for name, values in by_name.items()}
    differing = {
        name: dict(list(values.items())[:RANKS_PER_METRIC])
        for name, values in by_name.items()
        if any(repr(value) != repr(next(iter(values.values()))) for value in values.values())
    }
    return reduced, differing


def _mean(values: Sequence[Any]) -> Any:
    """The mean of the numbers among them; where there are none, the first value."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if not numbers:
        return values[0]
    return numbers[0] if all(number == numbers[0] for number in numbers) else math.fsum(numbers) / len(numbers)


def _summed(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Not rounded on the way: the order of the ranks makes no difference."""
    return tuple(math.fsum(column) for column in zip(*parts, strict=True)) if all(parts) else ()


def _excess(reports: Sequence[StepReport]) -> float:
    if min(report.noncollective_s for report in reports) <= 0.0:
        return 0.0
    # Waiting for data has its own owner.
    working = [report.noncollective_s - report.data_wait_s for report in reports]
    return max(working) - median(working)


def _ranges(positions: Iterable[Range]) -> tuple[Range, ...]:
    return tuple((start, end) for start, end in positions)


def join(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions as sorted ranges, adjacent ones merged. Repeated positions stay visible."""
    joined: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The positions that are in any of the ranges, each once, as sorted, non-adjacent ranges."""
    whole: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return tuple(whole)
