"""Reading a stream that has epochs: one step ahead, so that the ranks agree on a step's cut before it begins.

Each reader's samples of an epoch are cut into micro-batches by themselves; the last one is short. What the ranks have
to agree on is how many samples each reader has for the next step (`core.data.finite`). So a rank holds the next
micro-batch of each of its readers: when one is handed out, the reader's next one is taken from what was prefetched. The
sizes of all are known with the step's last micro-batch, and are summed while that one is computed. Only the first step
of a generation and of an epoch waits for the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from elastic.comm.agreement import Agreement
from elastic.core.data.finite import FinitePlace
from elastic.core.data.step_plan import StepPlan
from elastic.training.data.stream.loading import Loaded, Reading, StreamReader

# A micro-batch and its number of samples; 0: the reader's epoch is over.
Held = tuple[Loaded, int]
_ENDED: Held = ((None, {}, 0), 0)


class FiniteReader(StreamReader):
    """As `StreamReader`, of the micro-batches that the readers still have. States are those of what was handed out."""

    def __init__(self, reading: Reading, *args: Any, **kwargs: Any) -> None:
        """As `StreamReader`."""
        super().__init__(reading, *args, **kwargs)
        # By reader: its next micro-batch, `_ENDED` until the next epoch.
        self._held: dict[int, Held] = {}

    def sizes(self) -> list[int]:
        """Samples that each reader of the run has for the next step; 0 for those of other ranks."""
        sizes = [0] * self._reading.plan.slots.readers
        for reader in self._own:
            if reader not in self._held:
                self._held[reader] = next(self._source(reader))
            _, sizes[reader] = self._held[reader]
        return sizes

    def next_epoch(self) -> None:
        """All readers of the run are at their end."""
        self._held.clear()

    def leave_out(self) -> None:
        """What is held is not handed out to anybody."""
        for reader in self._own:
            if self._held[reader][1]:
                _, self._states[reader], _ = self._next(reader)

    def _micro_batches(self, reading: Reading, share: Collection[int]) -> IterableDataset[Any]:
        return FiniteMicroBatches(reading, share)

    def _next(self, reader: int) -> Loaded:
        loaded, _ = self._held.pop(reader)
        self._held[reader] = next(self._source(reader))
        return loaded


class FiniteMicroBatches(IterableDataset[Held]):
    """The micro-batches of some readers in rounds, one of each that is not at its end, which is said once per epoch.

    The next epoch follows whether or not other readers are at their end: it is prefetched, and waits there.
    """

    def __init__(self, reading: Reading, readers: Collection[int]) -> None:
        self._reading, self._readers = reading, readers

    def __iter__(self) -> Iterator[Held]:
        reading, slots = self._reading, self._reading.plan.slots
        readers = reading.readers(self._readers)
        place = reading.plan.finite
        assert place is not None
        while not place.over:
            running = list(readers.values())
            while running:
                for reader in tuple(running):
                    samples = reader.take(slots.size(reader.number), place.epoch)
                    if samples:
                        yield (reading.collate(samples), reader.state(), reader.sum), len(samples)
                    else:
                        running.remove(reader)
                        yield _ENDED
            place = replace(place, epoch=place.epoch + 1)


class Course:
    """The plan of a stream that has epochs, step by step: `plan` is that of the step under way, else of the next one.

    In every step `look_ahead` and `step_finished`. These and `settle` are collective; `settle` until `cut`.
    """

    def __init__(self, plan: StepPlan, reader: FiniteReader, agreement: Agreement) -> None:
        self.plan = plan
        self._reader = reader
        self._agreement = agreement
        self._next_cut: Callable[[], list[int]] | None = None

    @property
    def cut(self) -> bool:
        """Have the ranks agreed on the step to be done? They have not at the beginning, nor between two epochs: what
        comes after the last one that is asked for is not read."""
        return bool(self._place.cut)

    def look_ahead(self) -> None:
        """The last micro-batch of a step is at hand: agree on the next step while that one is computed."""
        self._next_cut = self._agreement.sums_later(self.offer())

    def step_finished(self) -> None:
        """Wait for what was agreed on; the plan is then that of the next step."""
        assert self._next_cut is not None
        sizes, self._next_cut = self._next_cut(), None
        self.plan = replace(self.plan, finite=self._place.after_step())
        self.agreed(sizes)

    def settle(self) -> None:
        """Agree on the step to be done now."""
        self.agreed(self._agreement.sums(self.offer()))

    def offer(self) -> list[int]:
        """By reader, the samples that this rank has for the step after the micro-batches handed out; none where another
        rank stands for the cell."""
        sizes = self._reader.sizes()
        return sizes if self.plan.leads else [0] * len(sizes)

    def agreed(self, sizes: Sequence[int]) -> None:
        """The sum of all offers. Raises UsageError, on every rank, for an epoch without any samples."""
        place = self._place.agreed(sizes)
        if not place.cut:
            self._reader.next_epoch()
        elif any(start <= place.position and place.end <= stop for start, stop in self.plan.skips):
            self._reader.leave_out()
            place = place.left_out()
        self.plan = replace(self.plan, finite=place)

    @property
    def _place(self) -> FinitePlace:
        assert self.plan.finite is not None
        return self.plan.finite
