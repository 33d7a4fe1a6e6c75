"""Reading the dealt micro-batches from the user's dataset, in this process or in worker processes."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, default_collate

from elastic.core.data.micro_batches import MicroBatch
from elastic.core.data.readers import ReaderStates
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.training import rng
from elastic.training.data.reading_processes import ReadingProcesses

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
# One sample as the sampler yields it: its position in the run and its index in the dataset.
Place = tuple[int, int]


class MicroBatchReader(Protocol):
    """Reads the micro-batches of one rank in the order in which they are dealt: `BatchReader` for random access,
    `stream.loading.StreamReader` for a stream."""

    sum: int

    def read(self, batches: Sequence[MicroBatch], number: int) -> Any:
        """The content of `batches[number]`; `sum` is then what it adds to `StepReport.content`."""
        ...

    def states(self) -> ReaderStates | None:
        """What is saved of this rank's readers, after the micro-batches read so far; None without a stream."""
        ...

    def close(self) -> None: ...


def has_random_access(dataset: Any) -> bool:
    """Does it have `__len__` and a `__getitem__` of its own? Then it is read by index, even if it is iterable too:
    LitData, mosaic, wids, Megatron's indexed datasets."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__ and hasattr(type(dataset), "__len__")


def require_map_style(dataset: Any) -> int:
    """The dataset's length. Raises UsageError for a dataset without random access."""
    if not has_random_access(dataset):
        raise UsageError(
            f"a {type(dataset).__qualname__} is not map-style, it lacks __len__ or __getitem__: give what streams to "
            "elastic.initialize(training_data=elastic.data.stream(...)) itself, without a DataLoader"
        )
    size = len(dataset)
    if size < 1:
        raise UsageError("training_data is empty")
    return size


class SeededDataset(Dataset[Any]):
    """Reads samples by (position, index). Each read is seeded by its position, so that random augmentation depends
    neither on the rank nor on which process reads."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, place: Place) -> Any:
        position, index = place
        rng.seed_host(self.seed, "sample", position)
        return self.dataset[index]


class BatchPlaces:
    """The real (weighted) micro-batches of one rank from `step` to the end of the run, as lists of places."""

    def __init__(self, plan: StepPlan, order: SampleOrder, step: int) -> None:
        self._plan, self._order, self._step = plan, order, step

    def __iter__(self) -> Iterator[list[Place]]:
        for step in itertools.takewhile(lambda step: not self._plan.over(step), itertools.count(self._step)):
            for batch in self._plan.deal(step):
                if batch.weight > 0:
                    yield places(self._order, batch)


def places(order: SampleOrder, batch: MicroBatch) -> list[Place]:
    positions = range(batch.start, batch.stop)
    return list(zip(positions, order.indices(batch.start, batch.stop), strict=True))


class BatchReader:
    """Yields the content of micro-batches in the order in which they are dealt to this rank.

    A padding pass gets a copy of a batch that this rank has read already, so that every sample is read once; only a
    rank that never had a batch of its own reads the one that it repeats. An audit's pass reads another rank's batch.
    """

    # Of random access, positions say everything.
    sum = 0

    def __init__(
        self,
        dataset: Any,
        plan: StepPlan,
        order: SampleOrder,
        step: int,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        processes: ReadingProcesses | None = None,
    ) -> None:
        self._collate: Collate = collate_fn or default_collate
        self._dataset = SeededDataset(dataset, order.seed)
        self._order = order
        self._spare: Any = None
        # Full steps are dealt alike; the last one may be short.
        first, last = plan.first_step, plan.last_step
        looked_at = {first} if last is None else {first, last - 1} if first < last else set[int]()
        self._pads = any(batch.weight == 0.0 and batch.audits is None for at in looked_at for batch in plan.deal(at))
        self._prefetched: Iterator[Any] | None = None
        self._processes = processes or ReadingProcesses()
        if num_workers > 0:
            how = {
                "collate_fn": self._collate,
                "num_workers": num_workers,
                "prefetch_factor": prefetch_factor,
                "pin_memory": pin_memory,
                "worker_init_fn": worker_init_fn,
                # Not the global generator, whose state belongs to the training loop.
                "generator": torch.Generator().manual_seed(rng.derive(order.seed, "workers")),
            }
            self._prefetched = self._processes.open(self._dataset, BatchPlaces(plan, order, step), how)

    def read(self, batches: Sequence[MicroBatch], number: int) -> Any:
        """The content of `batches[number]`."""
        batch = batches[number]
        if batch.audits is not None:
            return self._fetch(batch)
        if batch.weight == 0.0:
            if self._spare is None:
                self._spare = self._fetch(batch)
            return copy.deepcopy(self._spare)
        content = next(self._prefetched) if self._prefetched is not None else self._fetch(batch)
        if self._spare is None and self._pads:
            # A copy: the user may modify the batch, and padding passes need it whole.
            self._spare = copy.deepcopy(content)
        return content

    def states(self) -> ReaderStates | None:
        return None

    def close(self) -> None:
        prefetched, self._prefetched, self._spare = self._prefetched, None, None
        if prefetched is not None:
            self._processes.release()

    def _fetch(self, batch: MicroBatch) -> Any:
        return self._collate([self._dataset[place] for place in places(self._order, batch)])
