"""Streams of other libraries: Hugging Face's are adapted, what cannot be resumed is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from elastic.core.errors import UsageError
from elastic.training.data.stream.spec import Stream, stream
from elastic.training.data.stream.striped import Striped

_OWN = "; use elastic.data.stream(open) with open(reader, readers)"


@dataclass(frozen=True)
class HuggingFace:
    """An `open` for `elastic.data.stream` over a `datasets.IterableDataset`: reader i of R reads every R-th shard.
    `striped`: every reader reads all shards and keeps every R-th document."""

    dataset: Any
    striped: bool = False

    def check(self, readers: int) -> None:
        """Raises UsageError for fewer shards than readers."""
        shards = self.dataset.num_shards
        if not self.striped and shards < readers:
            raise UsageError(
                f"the Hugging Face dataset has {shards} shards, which cannot be shared between {readers} readers (one "
                "for each micro-batch of a step): use dataset.reshard() or a larger micro-batch, or "
                "elastic.data.stream(elastic.data.hugging_face(dataset, striped=True)), with which every reader reads "
                "all shards and keeps its share"
            )

    def fingerprint(self) -> str:
        """Name, split and number of shards; the content of remote files is not looked at."""
        info = self.dataset.info
        name = info.dataset_name or info.builder_name or "unnamed"
        return f"{name}, {self.dataset.num_shards} shards, split {self.dataset.split}"

    def __call__(self, reader: int, readers: int) -> Any:
        if self.striped:
            # Another object for each reader: it keeps its place in itself.
            return Striped(self.dataset.shard(num_shards=1, index=0), reader, readers)
        return self.dataset.shard(num_shards=readers, index=reader, contiguous=False)


def hugging_face(dataset: Any, striped: bool = False) -> HuggingFace:
    """Raises UsageError for a dataset whose place cannot be kept."""
    if not is_hugging_face(dataset):
        raise UsageError(f"elastic.data.hugging_face takes a datasets.IterableDataset, not a {_name(dataset)}")
    if getattr(dataset, "_distributed", None) is not None:
        raise UsageError(
            "the Hugging Face dataset was split by node (split_dataset_by_node): give the whole dataset on every rank, "
            "since its shards are shared out here and move when the number of workers changes"
        )
    for part in _parts(dataset._ex_iterable):
        if type(part).__name__ == "BufferShuffledExamplesIterable" and part.buffer_size > 1:
            raise UsageError(
                f"the Hugging Face dataset is shuffled with a buffer of {part.buffer_size} examples, which are not in "
                "its state and would be lost at every resume: leave .shuffle() out and use "
                "elastic.data.stream(elastic.data.hugging_face(dataset), shuffle_window=...)"
            )
    return HuggingFace(dataset, striped)


def is_hugging_face(data: Any) -> bool:
    return any(
        base.__module__.startswith("datasets.") and base.__name__ == "IterableDataset" for base in type(data).__mro__
    )


def passes_of(data: Any) -> Stream:
    """As libraries read what has no length: each pass over it is an epoch. Raises UsageError, as `streamed`."""
    return stream(hugging_face(data), repeat=False) if is_hugging_face(data) else streamed(data)


def streamed(data: Any) -> Stream:
    """The stream of training data without random access. Raises UsageError for what cannot be shared out or resumed."""
    if isinstance(data, Stream):
        return data
    if is_hugging_face(data):
        return stream(hugging_face(data))
    if any(base.__module__.startswith("ray.data") for base in type(data).__mro__):
        raise UsageError(
            f"a {_name(data)} has no state to resume from, and Ray Data's streaming_split drops the rows that do not "
            f"divide: read the same files with elastic.data.stream(elastic.data.jsonl(url)), for example{_OWN}"
        )
    if callable(data):
        raise UsageError(f"training_data is the function {_name(data)}: give elastic.data.stream(function)")
    raise UsageError(
        f"training_data is a {_name(data)}, which has neither __len__ and __getitem__ nor a way to be shared between "
        f"readers: no sample could be seen exactly once when the number of workers changes{_OWN}"
    )


def _parts(iterable: Any) -> Iterator[Any]:
    """An examples iterable of Hugging Face, and those that it reads from."""
    yield iterable
    inner = getattr(iterable, "ex_iterable", None)
    for part in [*([] if inner is None else [inner]), *getattr(iterable, "ex_iterables", ())]:
        yield from _parts(part)


def _name(data: Any) -> str:
    kind = data if isinstance(data, type | FunctionType) else type(data)
    return f"{kind.__module__}.{kind.__qualname__}"
