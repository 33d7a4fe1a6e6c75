"""A torch DataLoader made elastic: dataset, collation, workers and shuffling are taken over, ranks' samplers are not
needed any more. What cannot be taken over is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from elastic.core.data.readers import ReaderStates
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.training.data.blocks import InBlocks
from elastic.training.data.reader import (
    BatchReader,
    Collate,
    MicroBatchReader,
    has_random_access,
    require_map_style,
)
from elastic.training.data.reading_processes import ReadingProcesses
from elastic.training.data.stream.finite import FiniteReader
from elastic.training.data.stream.foreign import streamed
from elastic.training.data.stream.loading import StreamReader, stream_reader
from elastic.training.data.stream.spec import Stream
from elastic.training.scope import GenerationScope

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSource:
    """What samples come from, and how they are read. `micro_batch` is a DataLoader's batch size, None for a dataset."""

    dataset: Any
    # None: a stream, which is `dataset`.
    size: int | None
    shuffle: bool = True
    micro_batch: int | None = None
    collate_fn: Collate | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], None] | None = None
    sampler: Any = None
    # Of a dataset; a stream's end with each generation, since they know where the stream is.
    processes: ReadingProcesses = field(default_factory=ReadingProcesses, compare=False)


class PreparedLoader:
    """What `elastic.prepare_data_loader` gives back: it becomes the run's loader in `elastic.initialize`.

    Iterating it, and everything else, is then the run's `ElasticLoader`.
    """

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.loader: Any = None

    def __iter__(self) -> Any:
        return self._once_initialized() if self.loader is None else iter(self.loader)

    def __len__(self) -> int:
        return len(self._initialized())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._initialized(), name)

    def _once_initialized(self) -> Iterator[Any]:
        """Scripts may make their iterator before the engine."""
        yield from self._initialized()

    def _initialized(self) -> Any:
        if self.loader is None:
            raise UsageError(
                "elastic.prepare_data_loader(loader) was called, but elastic.initialize was not yet, or with another "
                "training_data: call prepare_data_loader first, then initialize, then iterate. A schedule that is made "
                "before counts steps: epochs * ceil(len(dataset) / global batch), not by len(loader)"
            )
        return self.loader


def data_source(
    training_data: Any, collate_fn: Collate | None, num_workers: int, prefetch_factor: int | None
) -> DataSource:
    """From `elastic.initialize`'s arguments. Raises UsageError for what is said twice or cannot be taken over."""
    if isinstance(training_data, PreparedLoader):
        source = training_data.source
    elif isinstance(training_data, DataLoader):
        source = taken_over(training_data)
    else:
        stream = None if has_random_access(training_data) else streamed(training_data)
        return DataSource(
            training_data if stream is None else stream,
            require_map_style(training_data) if stream is None else None,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )
    if collate_fn is not None and collate_fn is not source.collate_fn:
        raise UsageError("collate_fn was given to elastic.initialize and to the DataLoader; give it to one of them")
    if num_workers and num_workers != source.num_workers:
        raise UsageError("num_workers was given to elastic.initialize and to the DataLoader; give it to one of them")
    return replace(source, prefetch_factor=prefetch_factor or source.prefetch_factor)


def taken_over(loader: DataLoader[Any]) -> DataSource:
    """What a DataLoader says. Raises UsageError naming what the platform cannot keep."""
    require_map_style(loader.dataset)
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "not made (batch_size=None)" if batches is None else f"made by {type(batches).__qualname__}"
        raise UsageError(
            f"the DataLoader's batches are {what}: batches are dealt to ranks here, so that they can be dealt "
            "anew when the number of workers changes; give a DataLoader with batch_size=, or the dataset"
        )
    # A DataLoader that was given a batch sampler has a sampler of its own, which it does not use.
    dataset, shuffle = _order(loader.dataset, batches.sampler)
    if loader.timeout:
        logger.warning("the DataLoader's timeout is not used: a batch that does not come is a hang of the run")
    return DataSource(
        dataset,
        require_map_style(dataset),
        shuffle,
        int(batches.batch_size),
        loader.collate_fn,
        loader.num_workers,
        loader.prefetch_factor,
        loader.worker_init_fn,
        batches.sampler,
    )


def open_reader(
    source: DataSource,
    plan: StepPlan,
    scope: GenerationScope,
    in_child: Callable[[int], None],
    states: ReaderStates | None = None,
) -> MicroBatchReader:
    """Reads `source` from the scope's step on, a stream from `states`; `in_child` is called in every reading process,
    before the user's own. Raises UsageError for a stream that cannot be shared between the readers of a step."""
    init = in_child if source.worker_init_fn is None else _Both(in_child, source.worker_init_fn)
    how: dict[str, Any] = {
        "num_workers": source.num_workers,
        "prefetch_factor": source.prefetch_factor,
        "pin_memory": scope.device.type == "cuda",
        "worker_init_fn": init,
    }
    if isinstance(source.dataset, Stream):
        source.dataset.check(plan.slots.readers)
        kind = StreamReader if plan.finite is None else FiniteReader
        seed, collate = scope.spec.seed, source.collate_fn
        return stream_reader(source.dataset.parts, plan, seed, scope.step, states, collate, kind, **how)
    order = plan.order(scope.spec.seed)
    how["processes"] = source.processes
    return BatchReader(source.dataset, plan, order, scope.step, source.collate_fn, **how)


class _Both:
    """Two functions of a reading process; an object, since such a process may be started without forking."""

    def __init__(self, first: Callable[[int], None], second: Callable[[int], None]) -> None:
        self._first, self._second = first, second

    def __call__(self, worker: int) -> None:
        self._first(worker)
        self._second(worker)


def _order(dataset: Any, sampler: Any) -> tuple[Any, bool]:
    """(what to read, whether it is shuffled). Each epoch holds every sample once, whoever reads it."""
    # Exact types: a subclass may order samples in any way.
    kind = type(sampler)
    if kind is SequentialSampler:
        return dataset, False
    if kind is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return dataset, True
    if kind is DistributedSampler:
        return dataset, bool(sampler.shuffle)
    if kind is SubsetRandomSampler and not isinstance(dataset, InBlocks):
        return Subset(dataset, list(sampler.indices)), True
    what = f"{kind.__qualname__} over blocks" if kind is SubsetRandomSampler else kind.__qualname__
    if kind is RandomSampler:
        what += " with replacement" if sampler.replacement else f" with num_samples={sampler.num_samples}"
    raise UsageError(
        f"the DataLoader's sampler is a {what}, whose order cannot be kept when the number of workers changes; use "
        "shuffle=True, shuffle=False, a DistributedSampler or a SubsetRandomSampler, or put the order or the weights "
        "into the dataset"
    )
