"""Streams of other libraries, the real ones where they are installed, and what is refused, in one sentence each."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.data
from stream_samples import SEED, Numbers
from torch.utils.data import IterableDataset

import elastic
from elastic.core.data.readers import ReaderStates
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import UsageError
from elastic.training.data.data_loaders import data_source
from elastic.training.data.stream.foreign import streamed
from elastic.training.data.stream.loading import StreamReader, stream_reader
from elastic.training.data.stream.reader import Reader
from elastic.training.data.stream.spec import Stream


def source_of(data: Any) -> Any:
    return data_source(data, None, 0, None)


class Both(IterableDataset[int]):
    """Map-style and iterable, as LitData's, mosaic's and wids' datasets are."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def test_what_is_map_style_too_is_read_by_index() -> None:
    assert source_of(Both()).size == 12


def test_a_stream_has_no_size() -> None:
    stream = elastic.data.stream(Numbers, shuffle_window=4)
    source = source_of(stream)
    assert (source.dataset, source.size) == (stream, None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Streamed(), "nor a way to be shared between readers: no sample could be seen exactly once"),
        ((number for number in range(3)), "builtins.generator, which has neither"),
        (Numbers, "is the function stream_samples.Numbers: give elastic.data.stream"),
    ],
)
def test_what_cannot_be_shared_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        source_of(data)


def test_iterators_of_ray_data_are_refused() -> None:
    class Split(ray.data.DataIterator):  # type: ignore[misc]
        def __init__(self) -> None: ...

    Split.__abstractmethods__ = frozenset()
    with pytest.raises(UsageError, match="has no state to resume from, and Ray Data's streaming_split drops the rows"):
        streamed(Split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"open": 3}, "takes a function open"),
        ({"shuffle_window": -1}, "at least 0, got -1"),
    ],
)
def test_arguments_that_cannot_be_kept_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        elastic.data.stream(**{"open": Numbers, **arguments})
    with pytest.raises(UsageError, match="needs at least one token"):
        elastic.data.Pack(0)


def test_a_mixture_names_what_defines_it() -> None:
    one, two = elastic.data.stream(Numbers, fingerprint="a"), elastic.data.stream(Numbers, pack=elastic.data.Pack(4))
    mixed = elastic.data.mix([one, two], [1, 3])
    assert dict(mixed.facts)["weights of the mixture"] == "1, 3"
    assert dict(mixed.facts)["streamed files of stream 0"] == "a"
    for streams, weights in (([one], [1]), ([one, two], [1]), ([one, two], [1, 0]), ([mixed, one], [1, 1])):
        with pytest.raises(UsageError, match=r"elastic\.data\.mix"):
            elastic.data.mix(streams, weights)
    once = elastic.data.stream(Numbers, repeat=False)
    with pytest.raises(UsageError, match="some of the streams have repeat=False and others not"):
        elastic.data.mix([one, once], [1, 1])
    assert (one.repeat, mixed.repeat, elastic.data.mix([once, once], [1, 1]).repeat) == (True, True, False)


# -- with the real libraries ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_lit_data_is_read_by_index(tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata", reason="litdata is not installed")
    writer = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(tmp_path), chunk_size=4)
    for number in range(10):
        writer[number] = {"x": number}
    writer.done()
    writer.merge()
    dataset = litdata.StreamingDataset(str(tmp_path))
    assert isinstance(dataset, IterableDataset)
    source = source_of(dataset)
    assert (source.size, [source.dataset[index]["x"] for index in (9, 0, 5)]) == (10, [9, 0, 5])


def hugging_face(shards: int = 4, length: int = 24) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets (Hugging Face) is not installed")
    return datasets.Dataset.from_dict({"x": list(range(length))}).to_iterable_dataset(num_shards=shards)


def resumed_everywhere(stream: Stream, readers: int, samples: int) -> list[list[Any]]:
    """What each reader gives, after it was found that reading resumes at every sample."""
    shares = []
    for number in range(readers):
        whole = Reader(stream.parts, SEED, number, readers).read(0, samples)
        for at in range(samples):
            reader = Reader(stream.parts, SEED, number, readers)
            first = reader.read(0, at)
            for _ in range(3):
                reader = Reader(stream.parts, SEED, number, readers, json.loads(json.dumps(reader.state())))
            assert first + reader.read(at, samples - at) == whole
        shares.append(whole)
    return shares


def epochs_resumed_everywhere(stream: Stream, readers: int, epochs: int) -> list[list[list[Any]]]:
    """What each reader gives in each epoch, after it was found that reading resumes at every sample and every end."""

    def read(number: int, again_at: int) -> list[list[Any]]:
        reader = Reader(stream.parts, SEED, number, readers)
        given: list[list[Any]] = []
        for epoch in range(epochs):
            given.append([])
            while True:
                if reader.count == again_at:
                    reader = Reader(stream.parts, SEED, number, readers, json.loads(json.dumps(reader.state())))
                if not (taken := reader.take(1, epoch)):
                    break
                given[-1] += taken
        return given

    shares = []
    for number in range(readers):
        whole = read(number, -1)
        for at in range(sum(map(len, whole)) + 1):
            assert read(number, at) == whole
        shares.append(whole)
    return shares


def test_epochs_of_a_hugging_face_stream_end_with_its_shards() -> None:
    for window in (0, 5):
        uneven = hugging_face(shards=5).filter(lambda row: row["x"] % 3)
        stream = elastic.data.stream(elastic.data.hugging_face(uneven), shuffle_window=window, repeat=False)
        shares = epochs_resumed_everywhere(stream, 2, 3)
        assert len(shares[0][0]) != len(shares[1][0])
        for epoch in range(3):
            assert sorted(row["x"] for share in shares for row in share[epoch]) == [x for x in range(24) if x % 3]


def test_hugging_face_streams_are_read_by_shards() -> None:
    plain = hugging_face()
    mapped = plain.map(lambda row: {"y": row["x"] * 2}).filter(lambda row: row["x"] % 3)
    for dataset, kept in ((plain, range(24)), (mapped, [x for x in range(24) if x % 3])):
        stream = source_of(dataset).dataset
        stream.check(3)
        shares = resumed_everywhere(stream, 2, len(kept) // 2)
        assert sorted(row["x"] for share in shares for row in share) == list(kept)


def test_windows_over_a_hugging_face_stream_and_more_epochs() -> None:
    stream = elastic.data.stream(elastic.data.hugging_face(hugging_face()), shuffle_window=5)
    shares = resumed_everywhere(stream, 2, 30)
    assert [sorted(row["x"] for share in shares for row in share[at : at + 12]) for at in (0, 12)] == [
        list(range(24))
    ] * 2


def test_fewer_hugging_face_shards_than_readers_are_refused_with_their_number() -> None:
    dataset = hugging_face(shards=2)
    with pytest.raises(UsageError, match="has 2 shards, which cannot be shared between 3 readers"):
        source_of(dataset).dataset.check(3)
    striped = elastic.data.stream(elastic.data.hugging_face(dataset, striped=True))
    striped.check(3)
    shares = resumed_everywhere(striped, 3, 8)
    assert sorted(row["x"] for share in shares for row in share) == list(range(24))


def test_hugging_face_buffers_are_refused() -> None:
    dataset = hugging_face()
    for shuffled in (dataset.shuffle(seed=1, buffer_size=10), dataset.shuffle(seed=1, buffer_size=10).map(dict)):
        with pytest.raises(UsageError, match="shuffled with a buffer of 10 examples"):
            source_of(shuffled)


def test_the_control_loses_samples_over_a_hugging_face_buffer() -> None:
    """Why the buffer is refused: its content is not in the state."""
    dataset = hugging_face().shuffle(seed=1, buffer_size=10)
    first, second = iter(dataset), hugging_face().shuffle(seed=1, buffer_size=10)
    given = [next(first)["x"] for _ in range(8)]
    second.load_state_dict(dataset.state_dict())
    assert sorted([*given, *(row["x"] for row in second)]) != list(range(24))


def test_a_hugging_face_dataset_that_is_split_by_node_is_refused() -> None:
    dataset = hugging_face()
    distributed = pytest.importorskip("datasets.distributed")
    with pytest.raises(UsageError, match="split_dataset_by_node"):
        source_of(distributed.split_dataset_by_node(dataset, rank=0, world_size=2))
    with pytest.raises(UsageError, match=r"takes a datasets\.IterableDataset, not a builtins\.list"):
        elastic.data.hugging_face([1, 2])


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_streams_are_read_in_loading_processes(processes: int) -> None:
    """There the library shares shards out by itself, between the loading processes that it believes in."""
    stream = elastic.data.stream(elastic.data.hugging_face(hugging_face()), shuffle_window=3)
    plan = StepPlan(4, 2, 1, 0, None, None, 2, stream=stream.facts)
    expected = [[row["x"] for row in Reader(stream.parts, SEED, reader, 2).read(0, 24)] for reader in (0, 1)]

    def opened(step: int, states: ReaderStates | None) -> StreamReader:
        return stream_reader(stream.parts, plan, SEED, step, states, None, num_workers=processes)

    first = opened(0, None)
    read: list[list[int]] = [[], []]
    for step in range(12):
        if step in (1, 5, 7):
            states = first.states()
            first.close()
            first = opened(step, states)
        for number in range(2):
            read[number] += first.read(plan.deal(step), number)["x"].tolist()
    first.close()
    assert read == expected


def test_nodes_of_torchdata_are_read_by_their_state() -> None:
    nodes = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

    def opened(reader: int, readers: int) -> Any:
        return nodes.Loader(nodes.IterableWrapper(range(reader, 24, readers)))

    shares = resumed_everywhere(elastic.data.stream(opened, shuffle_window=3), 2, 12)
    assert sorted(number for share in shares for number in share) == list(range(24))
    for window in (0, 3):
        for share in epochs_resumed_everywhere(elastic.data.stream(opened, shuffle_window=window), 3, 2):
            assert list(map(len, share)) == [8, 8]
