"""The ranks' reports of finished steps, put together: one complete step is what the run knows and shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from elastic.core.events import FirstStepDone

Range = tuple[int, int]


@dataclass(frozen=True)
class CompletedStep:
    """A step that every rank has finished: sums over ranks, and the slowest rank's times.

    `positions` are joined half-open ranges of the global sample order; `loss` is the mean over the global batch.
    `anomaly` says why the step was not applied, where it was not; `skipped` is then what it would have consumed.
    `own_s[rank]` is what the rank did not spend in collectives (0.0: not measured), `straggler_s` how much longer the
    slowest rank worked than the median, apart from waiting for data.
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
    own_s: tuple[float, ...] = ()
    straggler_s: float = 0.0

    @property
    def first_step_done(self) -> FirstStepDone | None:
        """The event for the state machine, when this is the generation's first complete step."""
        return FirstStepDone(self.generation, self.step) if self.first else None


@dataclass(frozen=True)
class _Part:
    loss: float
    positions: tuple[Range, ...]
    samples: int
    duration_s: float
    data_wait_s: float
    save_stall_s: float
    tokens: int
    grad_norm: float | None
    learning_rates: tuple[float, ...]
    anomaly: str
    skipped: tuple[Range, ...]
    own_s: float


class StepTable:
    """The ranks' reports of one generation, put together step by step. Reports of other generations are dropped."""

    def __init__(self) -> None:
        # The generation that is being counted; -1 before the first.
        self.generation = -1
        self._world_size = 0
        self._parts: dict[int, dict[int, _Part]] = {}
        self._done: set[int] = set()
        self._done_below = 0
        self._last: dict[int, int] = {}
        self._first = True

    def begin(self, generation: int, world_size: int, start_step: int = 0) -> None:
        """A generation of `world_size` ranks begins after `start_step` finished steps."""
        self.generation, self._world_size, self._done_below = generation, world_size, start_step + 1
        self._parts, self._done, self._last, self._first = {}, set(), {}, True

    def add(
        self, generation: int, rank: int, step: int, loss: float, positions: Iterable[Range], samples: int,
        duration_s: float, data_wait_s: float = 0.0, grad_norm: float | None = None,
        learning_rates: Iterable[float] = (), tokens: int = 0, save_stall_s: float = 0.0, anomaly: str = "",
        skipped: Iterable[Range] = (), own_s: float = 0.0,
    ) -> CompletedStep | None:  # fmt: skip
        """One rank's report of finished step `step`; the completed step when it was the last one missing.

        A report that came before, in whatever form, changes nothing: the first one counts.
        """
        if generation != self.generation or not 0 <= rank < self._world_size or self._is_done(step):
            return None
        self._last[rank] = max(step, self._last.get(rank, step))
        parts = self._parts.setdefault(step, {})
        part = _Part(
            loss, _ranges(positions), samples, duration_s, data_wait_s, save_stall_s, tokens, grad_norm,
            tuple(learning_rates), anomaly, _ranges(skipped), own_s,
        )  # fmt: skip
        parts.setdefault(rank, part)
        return self._complete(step) if len(parts) == self._world_size else None

    def behind(self) -> tuple[int, ...]:
        """Ranks that have finished fewer steps than the furthest one."""
        furthest = max(self._last.values(), default=0)
        return tuple(rank for rank in range(self._world_size) if self._last.get(rank, 0) < furthest)

    def known(self, step: int) -> None:
        """The step was completed, as the journal tells: reports of it that come again change nothing."""
        self._mark_done(step)

    def first_known(self, generation: int) -> None:
        """The state machine has been told of the generation's first step. That the step is written down does not say
        so: a controller may have ended between the two."""
        if generation == self.generation:
            self._first = False

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
        by_rank = self._parts.pop(step)
        parts = [by_rank[rank] for rank in sorted(by_rank)]
        self._mark_done(step)
        norms = [part.grad_norm for part in parts if part.grad_norm is not None]
        return CompletedStep(
            generation=self.generation,
            step=step,
            first=first,
            loss=sum(part.loss for part in parts),
            positions=join(position for part in parts for position in part.positions),
            samples=sum(part.samples for part in parts),
            duration_s=max(part.duration_s for part in parts),
            data_wait_s=max(part.data_wait_s for part in parts),
            save_stall_s=max(part.save_stall_s for part in parts),
            tokens=sum(part.tokens for part in parts),
            # DeepSpeed reports a norm that is not finite as -1: one rank that saw it is enough.
            grad_norm=-1.0 if any(norm < 0 for norm in norms) else max(norms, default=None),
            learning_rates=parts[0].learning_rates,
            # A rank whose loss was no number says so; the others know the gradient only.
            anomaly=max((part.anomaly for part in parts), key=lambda text: (bool(text), "loss" in text)),
            skipped=join(position for part in parts for position in part.skipped),
            own_s=tuple(part.own_s for part in parts),
            straggler_s=_excess(parts),
        )


def _excess(parts: Sequence[_Part]) -> float:
    if min(part.own_s for part in parts) <= 0.0:
        return 0.0
    # Waiting for data has its own owner.
    working = [part.own_s - part.data_wait_s for part in parts]
    return max(working) - median(working)


def _ranges(positions: Iterable[Range]) -> tuple[Range, ...]:
    return tuple((start, end) for start, end in positions)


def join(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions as sorted ranges, those that touch made one. Positions that come twice stay visible."""
    joined: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The positions that are in any of the ranges, each once, as sorted ranges that do not touch."""
    whole: list[Range] = []
    for start, end in sorted(r for r in ranges if r[0] < r[1]):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return tuple(whole)
