"""Which samples each step of a run consumes on one rank, as far as the run's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from elastic.core.data.adaptive_batch import AdaptiveBatch, Change, changed, consumed
from elastic.core.data.audits import AuditPlan, Round
from elastic.core.data.finite import FinitePlace, deal_cut
from elastic.core.data.micro_batches import MicroBatch, deal, next_position, step_positions, steps_in
from elastic.core.data.readers import Slots
from elastic.core.data.samples import SampleOrder
from elastic.core.data.steps import Range
from elastic.core.data.unfinished import Rest
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class StepPlan:
    """The fixed facts by which any step of the run is dealt. All figures count samples, except `world_size`, `rank`
    and `micro_steps` (the micro-batches of a full step on each rank: the gradient accumulation steps).

    Where ranks share sequences (`core.mesh`), `world_size` and `rank` are those of cells; `leads` is True for the rank
    of each cell that stands for it wherever samples are counted.

    `total_samples` is what the run consumes; None where the training function alone decides when the run ends. `skips`
    are the ranges of positions that the run leaves out. Without `shuffle` every epoch has the dataset's own order.

    A stream has no `dataset_size`: its positions are those of its readers (`core.data.readers`), it has one endless
    epoch, and `stream` names what else defines its order. `block` and `blocks_at_once`: see `SampleOrder`.

    A stream that has epochs is planned one step ahead: `finite` says where it stands, and this plan answers for the
    step that begins there.

    `audit`: in some steps every rank runs one pass more (None: in none).

    `rest`: of this one step some micro-batches are computed already, and only the others are dealt.

    `adaptive`: the batch follows the number of workers, of whom the most have `full_batch`. `global_batch` is then that
    of the steps from the last of `changes` on; None: all steps have `global_batch`, and `full_batch` is the same."""

    global_batch: int
    micro_batch: int
    world_size: int
    rank: int
    dataset_size: int | None
    total_samples: int | None
    micro_steps: int
    skips: tuple[Range, ...] = ()
    shuffle: bool = True
    stream: tuple[tuple[str, str], ...] = ()
    block: int = 0
    blocks_at_once: int = 1
    finite: FinitePlace | None = None
    leads: bool = True
    audit: AuditPlan | None = None
    rest: Rest | None = None
    adaptive: AdaptiveBatch | None = None
    full_batch: int | None = None
    changes: tuple[Change, ...] = (Change(0, 0, 0),)

    def from_step(self, step: int, changes: tuple[Change, ...], batch: BatchSettings) -> StepPlan:
        """The plan of a run whose first `step` steps had these batches, where the batch follows the workers."""
        found = changed(changes, step, consumed(changes, step), self.global_batch)
        limited = replace(self, changes=found)
        return replace(limited, total_samples=limited.total(batch))

    def total(self, batch: BatchSettings) -> int | None:
        """`total_samples`, by what the job says."""
        begun = self._begun
        return total_samples(self.dataset_size, self.global_batch, batch.max_steps, batch.epochs, self.skips, begun)

    @property
    def rate_factor(self) -> Callable[[int], float] | None:
        """Of the learning rate, by finished steps; None where nothing changes it."""
        adaptive, full = self.adaptive, self.full_batch
        if adaptive is None or full is None:
            return None
        return lambda step: adaptive.factor(full, self.changes, step)

    @property
    def _begun(self) -> tuple[int, int]:
        return self.changes[-1][:2]

    def order(self, seed: int) -> SampleOrder:
        """The dataset index of every position; of a stream, the position itself."""
        if self.dataset_size is None:
            return SampleOrder(_ENDLESS, seed, shuffle=False)
        return SampleOrder(self.dataset_size, seed, self.shuffle, self.block, self.blocks_at_once)

    @property
    def slots(self) -> Slots:
        """The readers of a stream."""
        return Slots(self.global_batch, self.micro_batch)

    @property
    def first_step(self) -> int:
        """From this one on the plan can say how a step is dealt."""
        return self._begun[0]

    @property
    def last_step(self) -> int | None:
        """Number of steps in the whole run, where it is known."""
        if self.total_samples is None:
            return None
        step, samples = self._begun
        return step + steps_in(max(0, self.total_samples - samples), self.global_batch)

    @property
    def endless(self) -> bool:
        """A stream whose readers begin anew by themselves, without epochs that the run could count."""
        return self.dataset_size is None and self.finite is None

    @property
    def bounded(self) -> bool:
        """Does the run have an end of its own? Otherwise the training function alone decides."""
        return self.total_samples is not None or (self.finite is not None and self.finite.epochs is not None)

    def over(self, step: int) -> bool:
        """Is nothing left to do when `step` steps are finished?"""
        last = self.last_step
        return (last is not None and step >= last) or (self.finite is not None and self.finite.over)

    def deal(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches in a step; in an audited one with the passes that repeat others."""
        return (*self._dealt(step, self.rank), *(self.repeated(step, round_) for round_ in self.audits(step)))

    def audits(self, step: int) -> tuple[Round, ...]:
        return () if self.audit is None else self.audit.rounds(step, self.world_size)

    def audited(self, step: int, rank: int) -> MicroBatch | None:
        """The micro-batch of `rank` that is repeated in an audited step; None where it has only padding."""
        assert self.audit is not None
        own = [batch for batch in self._dealt(step, rank) if batch.weight > 0.0]
        return own[self.audit.number(step) % len(own)] if own else None

    def repeats(self, step: int, rank: int, round_: Round) -> int:
        """The rank whose micro-batch `rank` repeats: where that has none of its own, the next one up that has."""
        assert self.audit is not None
        at = rank + self.audit.distance(step, round_, self.world_size)
        around = ((at + more) % self.world_size for more in range(self.world_size))
        return next(rank for rank in around if self.audited(step, rank) is not None)

    def repeated(self, step: int, round_: Round) -> MicroBatch:
        """This rank's pass of an audit."""
        of = self.repeats(step, self.rank, round_)
        original = self.audited(step, of)
        assert original is not None
        return replace(original, weight=0.0, audits=of, audited_weight=original.weight)

    def _dealt(self, step: int, rank: int) -> tuple[MicroBatch, ...]:
        if self.finite is not None:
            # Before the ranks have agreed, a whole step: what is compared when a state was restored.
            cut = self.finite.cut or [self.slots.size(reader) for reader in range(self.slots.readers)]
            return deal_cut(self._place(step).position, cut, self.world_size, rank)
        only = self.rest.indices if self.rest is not None and self.rest.step == step else None
        return deal(
            step, self.global_batch, self.micro_batch, self.world_size, rank, self.total_samples, self.skips, only,
            self._begun,
        )  # fmt: skip

    def consumed(self, step: int) -> int:
        """Samples that were consumed when `step` steps are finished."""
        if self.finite is not None:
            done = self.finite.after_step() if step == self.finite.step + 1 else self._place(step)
            return done.samples
        found = self._whole(step)
        return found if self.total_samples is None else min(found, self.total_samples)

    def position(self, step: int) -> int:
        """The position of the sample that follows when `step` steps are finished."""
        if self.finite is not None:
            return self._place(step).position
        return next_position(self.consumed(step), self.skips)

    def positions(self, step: int) -> Range:
        """What the whole step consumes, on all ranks."""
        if self.finite is not None:
            return self._place(step).position, self.finite.end
        return step_positions(step, self.global_batch, self.total_samples, self.skips, self._begun)

    def epoch(self, step: int) -> int:
        """The epoch in which the step's first sample lies; a step may reach over into the next. At the end of a
        stream, its last one."""
        if self.finite is not None:
            return self.finite.epoch - 1 if self.finite.over else self.finite.epoch
        if self.dataset_size is None:
            return 0
        return next_position(self._whole(step), self.skips) // self.dataset_size

    def _whole(self, step: int) -> int:
        """Samples of so many steps, as if the run did not end."""
        return step * self.global_batch if self.adaptive is None else consumed(self.changes, step)

    def _place(self, step: int) -> FinitePlace:
        assert self.finite is not None
        assert self.finite.step == step, f"a stream stands before step {self.finite.step}, not {step}"
        return self.finite

    def _first_step(self, epoch: int, dataset_size: int) -> int:
        """The first step that begins in `epoch` or, where none does, in a later one; not limited by the run's end."""
        low, high = 0, self._begun[0] + (epoch + 1) * dataset_size // self.global_batch + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.epoch(middle) >= epoch else (middle + 1, high)
        return low

    def batches_in(self, epoch: int) -> int:
        """Micro-batches of this rank in the steps that begin in `epoch`, padding included. Raises TypeError for a
        stream without an end, and for one with epochs: they have no length."""
        last = self.last_step
        if self.finite is not None:
            raise TypeError("the loader of a stream with epochs has no length: its readers find their ends by reading")
        if self.dataset_size is None:
            if last is None:
                raise TypeError("the loader of a stream has no length where the job has no max_steps")
            first, end = 0, last if epoch == 0 else 0
        else:
            first, end = (self._first_step(number, self.dataset_size) for number in (epoch, epoch + 1))
        if last is None or end < last:
            return self._batches_between(first, end)
        # The run's last step may be short.
        return self._batches_between(first, last - 1) + (len(self.deal(last - 1)) if first < last else 0)

    def _batches_between(self, first: int, end: int) -> int:
        """In the full steps [first, end), none of them the run's last where that is short."""
        audits = 0 if self.audit is None else self.audit.passes_between(first, end, self.world_size)
        return max(0, end - first) * self.micro_steps + audits


def total_samples(
    dataset_size: int | None,
    global_batch: int,
    max_steps: int | None,
    epochs: int | None,
    skips: Iterable[Range] = (),
    begun: tuple[int, int] = (0, 0),
) -> int | None:
    """How many samples the run consumes: whichever of `max_steps` and `epochs` ends first; None without both, where the
    training function decides.

    Samples that are skipped are missing from an epoch, not from a number of steps. Nobody knows how many samples the
    epochs of a stream have (`dataset_size` None): see `core.data.finite`. `begun`: as in `step_positions`.
    """
    for name, value in (("max_steps", max_steps), ("epochs", epochs)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    limits = []
    if max_steps is not None:
        # A run that is beyond them already ends where it is.
        limits.append(begun[1] + max(0, max_steps - begun[0]) * global_batch)
    if epochs is not None and dataset_size is not None:
        whole = epochs * dataset_size
        limits.append(whole - sum(max(0, min(stop, whole) - start) for start, stop in skips))
    return min(limits, default=None)
