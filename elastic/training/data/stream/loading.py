"""Reading the micro-batches of a stream that are dealt to one rank, in this process or in loading processes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.readers import ReaderStates, owned
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.training import rng
from elastic.training.data.stream.reader import Parts, Reader

Collate = Callable[[list[Any]], Any]
# What the user gets; its reader's state after it; what it adds to the sum of its step.
Loaded = tuple[Any, dict[str, Any], int]
# Packed, a reader's tokens of an epoch may be a sample only together with those of the epoch before.
_FURTHER = 100


@dataclass(frozen=True)
class Reading:
    """What is read: the stream, its order and the place from which reading continues."""

    parts: Parts
    plan: StepPlan
    seed: int
    step: int
    states: Mapping[int, Any]
    collate: Collate

    def readers(self, numbers: Iterable[int]) -> dict[int, Reader]:
        """By number, where they stand. Raises UsageError for readers that share an object."""
        total = self.plan.slots.readers
        readers = {number: Reader(self.parts, self.seed, number, total, self.states.get(number)) for number in numbers}
        _require_own_sources(readers.values())
        return readers

    def shadow(self, number: int, samples: int) -> Any:
        """The first samples of another rank's reader, for a rank that has none: its state must not move."""
        finite = self.plan.finite
        state = self.parts.begin(0 if finite is None else finite.epoch)
        reader = Reader(self.parts, self.seed, number, self.plan.slots.readers, state)
        if finite is None:
            return self.collate(reader.read(0, samples))
        return self.collate(reader.take(samples, finite.epoch + _FURTHER))


class StreamReader:
    """As `BatchReader`, over a stream. Reader j of the rank's own is read in loading process j % num_workers, each of
    which prefetches by itself; the number of processes may differ between ranks and after every resume.

    The states are those after the micro-batches that were handed out, not after what was read in advance.
    """

    def __init__(
        self,
        reading: Reading,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        """Raises UsageError where a reader does not find again what it read before."""
        plan = reading.plan
        self._reading = reading
        self._own = owned(plan.slots.readers, plan.world_size, plan.rank)
        self._states = {reader: reading.states.get(reader) or reading.parts.begin() for reader in self._own}
        # Every step is whole, and dealt alike; but where there are epochs, any rank pads near the end of one.
        dealt = replace(plan, total_samples=None).deal(reading.step)
        self._pads = plan.finite is not None or any(batch.weight == 0.0 for batch in dealt)
        self._spare: Any = None
        # What the last micro-batch adds to the sum of its step.
        self.sum = 0
        shares = [self._own[number::num_workers] for number in range(num_workers)] if num_workers else [self._own]
        self._sources: list[Iterator[Any]] = []
        for share in filter(None, shares):
            micro_batches = self._micro_batches(reading, share)
            if num_workers == 0:
                self._sources.append(iter(micro_batches))
                continue
            loader = DataLoader(
                micro_batches,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=1,
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory,
                worker_init_fn=worker_init_fn,
                # Not the global generator, whose state belongs to the training loop.
                generator=torch.Generator().manual_seed(rng.derive(reading.seed, "workers")),
            )
            self._sources.append(iter(loader))

    def read(self, batches: Sequence[MicroBatch], number: int) -> Any:
        """The content of `batches[number]`."""
        batch = batches[number]
        if batch.weight == 0.0:
            self.sum = 0
            return copy.deepcopy(self._padding(batch))
        content, self._states[batch.index], self.sum = self._next(batch.index)
        if self._spare is None and self._pads:
            # A copy: the user may modify the batch, and padding passes need it whole.
            self._spare = copy.deepcopy(content)
        return content

    def states(self) -> ReaderStates | None:
        """Of this rank's own readers, after what was handed out; none where another rank stands for the cell."""
        plan = self._reading.plan
        return ReaderStates(plan.slots.readers, dict(self._states) if plan.leads else {})

    def close(self) -> None:
        """Stop the loading processes now, not when the garbage collector finds them."""
        sources, self._sources, self._spare = self._sources, [], None
        for source in sources:
            shut = getattr(source, "_shutdown_workers", None)
            if shut is not None:
                shut()

    def _micro_batches(self, reading: Reading, share: Collection[int]) -> IterableDataset[Any]:
        return MicroBatches(reading, share)

    def _source(self, reader: int) -> Iterator[Any]:
        """What the reader is read from; in the order of the deal."""
        return self._sources[(reader - self._own.start) % len(self._sources)]

    def _next(self, reader: int) -> Loaded:
        loaded: Loaded = next(self._source(reader))
        return loaded

    def _padding(self, batch: MicroBatch) -> Any:
        if self._spare is None:
            # This rank has read nothing yet, and perhaps never will: the first samples do as well as any.
            self._spare = self._reading.shadow(batch.index, batch.samples)
        return self._spare


class MicroBatches(IterableDataset[Loaded]):
    """The micro-batches of some readers from the step of `reading` to the end of the run, in the order of the deal."""

    def __init__(self, reading: Reading, readers: Collection[int]) -> None:
        self._reading, self._readers = reading, readers

    def __iter__(self) -> Iterator[Loaded]:
        reading, plan = self._reading, self._reading.plan
        readers = reading.readers(self._readers)
        for step in itertools.takewhile(lambda step: not plan.over(step), itertools.count(reading.step)):
            for batch in plan.deal(step):
                if batch.weight > 0.0 and batch.index in readers:
                    reader = readers[batch.index]
                    _, count = plan.slots.place(batch.start)
                    content = reading.collate(reader.read(count, batch.samples))
                    yield content, reader.state(), reader.sum


def stream_reader(
    parts: Parts,
    plan: StepPlan,
    seed: int,
    step: int,
    states: ReaderStates | None,
    collate: Collate | None,
    kind: type[StreamReader] = StreamReader,
    **how: Any,
) -> StreamReader:
    """Reads `parts` from `step` on; `how` are the keyword arguments of `StreamReader`."""
    known = {} if states is None else states.states
    return kind(Reading(parts, plan, seed, step, known, collate or default_collate), **how)


def _require_own_sources(readers: Iterable[Reader]) -> None:
    sources = [source for reader in readers for source in reader.sources]
    if len(set(map(id, sources))) < len(sources):
        raise UsageError(
            "open(reader, readers) of a stream has returned one object for two readers: each reader needs an object of "
            "its own, over its own share of the documents, since the object keeps the reader's place"
        )


def _as_it_is(item: Any) -> Any:
    return item
