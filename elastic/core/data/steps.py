"""What a rank reports of a step, and what all ranks' reports of it together say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.core.data.collectives import CollectiveUse
from elastic.core.events import FirstStepDone

Range = tuple[int, int]

# A record of a step keeps the values of at most this many ranks for each metric that differs between ranks.
RANKS_PER_METRIC = 32
_ALWAYS = ("step", "loss", "positions", "samples", "duration_s")
_WHERE_SET = (
    "tokens", "anomaly", "skipped", "metrics", "content", "grad_norm", "learning_rates", "gradient_parts",
    "sample_flops", "audit", "travel",
)  # fmt: skip


@dataclass(frozen=True)
class StepReport:
    """One rank's report of one finished optimizer step, the same object from the training thread to the controller.

    `positions` are the half-open ranges of the global sample order that this rank consumed with non-zero weight.
    `loss` is this rank's part of the global mean: the sum over its micro-batches of loss * samples / step samples, so
    that the sum over ranks is the loss of the global batch. `grad_norm` is the engine's (None if it has none).
    `duration_s` ends with the optimizer step; `save_stall_s` is how long snapshots delayed the training thread: for
    this step after it, and for the previous one during it; on a device, how long they delayed its stream. Of a step
    whose first micro-batches were computed in an earlier generation all times are those of its rest.
    `noncollective_s` is the part of `duration_s` that this rank did not spend in collectives (0.0: not measured).
    `anomaly` says why the step was not applied; `skipped` is then what it would have consumed.
    `metrics` is what the user attached with `elastic.report`.
    `content` stands for what was read from a stream (0: none): the sum over its readers, modulo 2**64.
    `collectives` are those of rank 0, empty on all others.
    `gradient_parts`, where the gradient noise was measured: (number of this rank's micro-batches, the sum of their
    share of the step's samples times the squared norm of their own gradient). A step's are the sums over the ranks.
    `sample_flops` are what the forward and backward pass of one sample takes, counted by rank 0 in the run's first step
    (0.0: not counted); negative where they were estimated. `energy_j` is what the rank's device has used since the
    report before (0.0: not measured). `audit` says what an audit of this step has found, the same on every rank
    ("": it was not audited): "agreed", or why the ranks were not compared.
    `slowed` says why the device's clocks are lowered, where it tells. `travel` is rank 0's: in the first step of a
    generation, and where it changes, by which strategy gradients travel and what the others would have cost.
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
    audit: str = ""
    slowed: str = ""
    travel: str = ""
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
        known |= {name: tuple(known.get(name, ())) for name in ("learning_rates", "gradient_parts")}
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
    where one did not measure; `sample_flops` is rank 0's. `audit` and `travel`: see `StepReport`. `slowed` is by rank,
    empty where no rank has a reason.
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
    audit: str = ""
    slowed: tuple[str, ...] = ()
    travel: str = ""

    @property
    def first_step_done(self) -> FirstStepDone | None:
        """The event for the state machine, when this is the generation's first complete step."""
        return FirstStepDone(self.generation, self.step) if self.first else None


def _ranges(positions: Iterable[Range]) -> tuple[Range, ...]:
    return tuple((start, end) for start, end in positions)


def shared_out(reports: Sequence[StepReport], rank: int, ranks: int) -> StepReport:
    """What one of `ranks` ranks reports of a step that other ranks had made, so that all together report the same."""
    own = reports[rank::ranks]
    first = reports[0]
    return replace(
        first,
        loss=sum(report.loss for report in own),
        positions=join(part for report in own for part in report.positions),
        samples=sum(report.samples for report in own),
        tokens=sum(report.tokens for report in own),
        metrics=own[0].metrics if own else {},
        rank=rank,
    )


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
