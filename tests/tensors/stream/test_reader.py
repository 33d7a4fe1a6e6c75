"""Readers of a stream against an oracle: one process, one pass, no states."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_samples import DOCUMENTS, SEED, Numbers, added, counted, documents, shown

from elastic.core.data.readers import Slots, owned
from elastic.core.errors import UsageError
from elastic.training.data.stream.pipeline import Pack, Stages
from elastic.training.data.stream.reader import Parts, Reader


def parts(kind: str) -> Parts:
    stages = {
        "plain": [Stages(Numbers)],
        "counted": [Stages(counted)],
        "windows": [Stages(Numbers, window=4)],
        "counted windows": [Stages(counted, window=4)],
        "packed": [Stages(Numbers, pack=Pack(5, 0))],
        "packed windows": [Stages(counted, 4, Pack(3), None)],
        "all": [Stages(Numbers, 3, Pack(7, 9), added)],
        "random": [Stages(counted, 2, None, added)],
        "mixed": [Stages(Numbers, 3, Pack(4, 9), added), Stages(counted, 2), Stages(Numbers)],
    }[kind]
    return Parts(tuple(stages), tuple(float(weight) for weight in range(1, len(stages) + 1)))


KINDS = ["plain", "counted", "windows", "counted windows", "packed", "packed windows", "all", "random", "mixed"]


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("kind", KINDS)
def test_reading_resumes_at_every_sample(kind: str) -> None:
    """Over three epochs, inside windows and documents, before the first sample, and three times in a row."""
    whole = Reader(parts(kind), SEED, 1, 2)
    samples = shown(whole.read(0, 40))
    for at in range(30):
        reader = Reader(parts(kind), SEED, 1, 2)
        read = shown(reader.read(0, at))
        for _ in range(3):
            reader = Reader(parts(kind), SEED, 1, 2, as_json(reader.state()))
            # Twice without reading in between: the state of what was just loaded.
            reader = Reader(parts(kind), SEED, 1, 2, as_json(reader.state()))
            read += shown(reader.read(reader.count, 3))
        read += shown(reader.read(reader.count, 40 - len(read)))
        assert read == samples
        assert (reader.count, reader.chain) == (whole.count, whole.chain)


@pytest.mark.parametrize("kind", ["windows", "counted windows"])
def test_windows_hold_every_document_of_an_epoch_once_in_another_order(kind: str) -> None:
    reader = Reader(parts(kind), SEED, 1, 2)
    for epoch in range(3):
        expected = documents(1, epoch if kind == "windows" else 0)
        read = reader.read(reader.count, DOCUMENTS)
        assert sorted(read) == sorted(expected)
        assert read != expected
        # The windows of nine documents are of 4, 4 and 1.
        assert sorted(read[:4]) == sorted(expected[:4])


def test_packed_samples_hold_all_tokens_in_order() -> None:
    tokens = [token for epoch in range(2) for document in documents(0, epoch) for token in (*document, 0)]
    samples = shown(Reader(parts("packed"), SEED, 0, 1).read(0, len(tokens) // 5))
    assert [token for sample in samples for token in sample] == tokens[: len(tokens) // 5 * 5]


def test_a_reader_drops_what_the_run_leaves_out() -> None:
    whole, dropping = Reader(parts("all"), SEED, 0, 1), Reader(parts("all"), SEED, 0, 1)
    samples = shown(whole.read(0, 20))
    assert shown(dropping.read(0, 3)) + shown(dropping.read(12, 8)) == samples[:3] + samples[12:]
    assert dropping.chain == whole.chain


def test_a_mixture_draws_by_its_weights() -> None:
    mixture = Parts((Stages(Numbers), Stages(counted)), (1.0, 3.0))
    drawn = [next(mixture.chosen(SEED, 2, count)) for count in range(4000)]
    assert 2850 < sum(drawn) < 3150
    assert drawn != [next(mixture.chosen(SEED, 3, count)) for count in range(4000)]


KILOBYTE = 1024


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixed"])
def test_a_state_is_small_whatever_was_read(kind: str) -> None:
    reader = Reader(parts(kind), SEED, 1, 2)
    reader.read(0, 200)
    assert len(json.dumps(reader.state())) < KILOBYTE / 2


class Changed(Numbers):
    """Its third document is another one than it was."""

    def __iter__(self) -> Iterator[list[int]]:
        for document in super().__iter__():
            yield [77, 77] if self.at == 3 else document


@pytest.mark.parametrize("window", [3, 4, 9])
def test_a_window_that_is_another_one_when_it_is_read_again_is_refused(window: int) -> None:
    reader = Reader(Parts((Stages(Numbers, window),), (1.0,)), SEED, 0, 1)
    reader.read(0, 2)
    with pytest.raises(UsageError, match="reader 0 reads other documents than before from document 0 of epoch 0"):
        Reader(Parts((Stages(Changed, window),), (1.0,)), SEED, 0, 1, reader.state())


def test_files_that_have_become_shorter_are_refused() -> None:
    reader = Reader(Parts((Stages(counted),), (1.0,)), SEED, 0, 1)
    reader.read(0, 5)

    def shorter(number: int, readers: int) -> Iterator[list[int]]:
        return iter(documents(number)[:4])

    with pytest.raises(UsageError, match="fewer than the 5 documents of epoch 0"):
        Reader(Parts((Stages(shorter),), (1.0,)), SEED, 0, 1, reader.state())


def test_a_reader_without_documents_is_refused() -> None:
    with pytest.raises(UsageError, match="reader 1 of 2 has no documents"):
        Reader(Parts((Stages(lambda reader, readers: []),), (1.0,)), SEED, 1, 2).read(0, 1)


def test_a_transform_that_is_another_one_when_it_is_repeated_is_refused() -> None:
    """Random by means that nobody seeds, as a tokenizer's dropout in another language is."""
    drawn = iter(range(1000))
    stages = Stages(Numbers, 3, Pack(4, 0), lambda document: [*document, 7, 7, 7, 7, next(drawn)])
    reader = Reader(Parts((stages,), (1.0,)), SEED, 0, 1)
    reader.read(0, 3)
    with pytest.raises(UsageError, match=r"transform= makes other tokens of a document of reader 0 than before"):
        Reader(Parts((stages,), (1.0,)), SEED, 0, 1, as_json(reader.state()))


def test_documents_without_any_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="no document of reader 0 in epoch 1 has any tokens"):
        Reader(Parts((Stages(lambda reader, readers: [[], []], pack=Pack(4)),), (1.0,)), SEED, 0, 1).read(0, 1)


@pytest.mark.parametrize("document", ["text", [[1], [2]], [0.5]])
def test_documents_that_are_no_tokens_are_refused(document: Any) -> None:
    with pytest.raises(UsageError, match=r"Pack needs token ids.*transform="):
        Reader(Parts((Stages(lambda reader, readers: [document], pack=Pack(4)),), (1.0,)), SEED, 0, 1).read(0, 1)


# -- ranks that come and go -------------------------------------------------------------------------------------------


class Prefetching(Numbers):
    """A control: its state is ahead of what it has given."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": min(self.at + 1, DOCUMENTS)}


def unsteady(reader: int, readers: int) -> Iterator[list[int]]:
    """A control: random inside the source."""
    return ([*document, random.randrange(1000)] for document in documents(reader))


def trained(stages: Parts, slots: Slots, sizes: list[tuple[int, int]], steps: int, every: int) -> list[Any]:
    """The content and sum of every step on the run's final timeline: generations of `sizes` (world size, steps until a
    node is lost), snapshots every `every` steps, from which the next generation resumes."""
    history: list[Any] = [None] * steps
    saved, states = 0, {}
    for world, lived in [*sizes, (2, steps)]:
        ranks = [
            {i: Reader(stages, SEED, i, slots.readers, states.get(i)) for i in owned(slots.readers, world, rank)}
            for rank in range(world)
        ]
        for step in range(saved, min(saved + lived, steps)):
            content, total = {}, 0
            for readers in ranks:
                for reader in readers.values():
                    _, count = slots.place(slots.position(reader.number, 0) + step * slots.global_batch)
                    content[reader.number] = shown(reader.read(count, slots.size(reader.number)))
                    total += reader.sum
            history[step] = (content, total % 2**64)
            if (step + 1) % every == 0:
                saved = step + 1
                states = {i: as_json(reader.state()) for readers in ranks for i, reader in readers.items()}
    return history


@pytest.mark.wide
@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(["plain", "windows", "packed windows", "all", "mixed"]),
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=4),
    st.integers(1, 4),
)
def test_every_history_trains_on_what_one_process_would(
    kind: str, global_batch: int, micro_batch: int, sizes: list[tuple[int, int]], every: int
) -> None:
    slots = Slots(global_batch, micro_batch)
    assert trained(parts(kind), slots, sizes, 8, every) == trained(parts(kind), slots, [], 8, 99)


@pytest.mark.parametrize("source", [Prefetching, unsteady], ids=["a state ahead", "random in the source"])
def test_the_controls_fail(source: Any) -> None:
    stages = Parts((Stages(source),), (1.0,))
    slots = Slots(4, 2)
    broken = trained(stages, slots, [(2, 3)], 6, 2)
    whole = trained(stages, slots, [], 6, 99)
    assert broken != whole
    assert [total for _, total in broken] != [total for _, total in whole]
