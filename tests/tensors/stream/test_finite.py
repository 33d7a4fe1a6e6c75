"""Epochs of streams whose readers are of unequal length, at any world size, against a single process that reads
everything in one pass; ranks are objects in one process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_samples import SEED, Ahead, added, shown

from elastic.core.data.finite import FinitePlace
from elastic.core.data.micro_batches import loss_scale
from elastic.core.data.readers import ReaderStates, merged
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.steps import Range, join, union
from elastic.core.errors import IntegrityError, UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.training.data import cursor
from elastic.training.data.stream import loading
from elastic.training.data.stream.finite import Course, FiniteReader
from elastic.training.data.stream.loading import stream_reader
from elastic.training.data.stream.pipeline import Pack, Stages
from elastic.training.data.stream.reader import Parts, Reader


def documents(lengths: tuple[int, ...], reader: int, epoch: int) -> list[list[int]]:
    """`lengths[reader]` documents of 0 to 6 tokens, each of the run another; other lengths in another epoch."""
    drawn = random.Random(f"{reader} {epoch}")
    number = lengths[(reader + epoch) % len(lengths)]
    return [[reader, epoch, at, *range(4)][: drawn.choice([0, 3, 4, 7])] for at in range(number)]


class Uneven:
    """A source with a state, and with epochs of its own."""

    def __init__(self, lengths: tuple[int, ...], reader: int) -> None:
        self.lengths, self.reader, self.epoch, self.at = lengths, reader, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[list[int]]:
        for document in documents(self.lengths, self.reader, self.epoch)[self.at :]:
            self.at += 1
            yield document


def parts(kind: str, lengths: tuple[int, ...]) -> Parts:
    def with_state(reader: int, readers: int) -> Any:
        return Uneven(lengths, reader)

    def counted(reader: int, readers: int) -> Any:
        return iter(documents(lengths, reader, 0))

    stages = {
        "plain": [Stages(with_state)],
        "counted": [Stages(counted)],
        "windows": [Stages(with_state, window=3, transform=added)],
        "packed": [Stages(counted, pack=Pack(5, 0))],
        "packed windows": [Stages(with_state, 3, Pack(7, 9), added)],
        "mixed": [Stages(with_state, 2, Pack(4, 9)), Stages(counted, transform=added), Stages(with_state)],
    }[kind]
    return Parts(tuple(stages), tuple(float(weight) for weight in range(1, len(stages) + 1)))


KINDS = ["plain", "counted", "windows", "packed", "packed windows", "mixed"]
# What a step trained on: its epoch, and by reader its samples; and the sum over its readers.
Step = tuple[int, dict[int, list[list[int]]], int]


def planned(global_batch: int, micro_batch: int, epochs: int | None) -> StepPlan:
    place = FinitePlace(epochs)
    return StepPlan(global_batch, micro_batch, 1, 0, None, None, 9, stream=(("pack", "5"),), finite=place)


def oracle(data: Parts, plan: StepPlan, epochs: int) -> list[Step]:
    """One process, one pass, no states: each reader is read by itself, and its epochs are cut into micro-batches."""
    readers = [Reader(data, SEED, number, plan.slots.readers) for number in range(plan.slots.readers)]
    steps: list[Step] = []
    for epoch in range(epochs):
        begun = len(steps)
        for reader in readers:
            at = begun
            while samples := reader.take(plan.slots.size(reader.number), epoch):
                if at == len(steps):
                    steps.append((epoch, {}, 0))
                _, content, total = steps[at]
                content[reader.number] = shown(samples)
                steps[at] = (epoch, content, (total + reader.sum) % 2**64)
                at += 1
    return steps


class Lockstep:
    """The agreement of ranks in one process, of which each says its part before any of them asks for the sum."""

    def __init__(self) -> None:
        self.offers: list[list[int]] = []

    def sums_later(self, values: list[int]) -> Callable[[], list[int]]:
        self.offers.append(values)
        return lambda: [sum(of_reader) for of_reader in zip(*self.offers, strict=True)]


Saved = tuple[dict[str, Any], ReaderStates]


class Ranks:
    """A generation: its ranks go through every step together."""

    def __init__(
        self, data: Parts, plan: StepPlan, world: int, saved: Saved | None, skips: tuple[Range, ...], processes: int = 0
    ) -> None:
        self.agreement: Any = Lockstep()
        self.courses, self.readers = [], []
        for rank in range(world):
            own = replace(plan, world_size=world, rank=rank, skips=skips)
            if saved is not None:
                assert own.finite is not None
                own = cursor.from_state(saved[0], own, BatchSettings(epochs=own.finite.epochs))
                if world == 1:
                    alone: Any = Whole()
                    here = cursor.to_state(own, SEED, saved[0]["step"])
                    cursor.verify(saved[0], here, own, own.order(SEED), alone)
            states, step = (None, 0) if saved is None else (saved[1], saved[0]["step"])
            factor = 2 if processes else None
            reader = stream_reader(
                data, own, SEED, step, states, list, FiniteReader, num_workers=processes, prefetch_factor=factor
            )
            assert isinstance(reader, FiniteReader)
            self.readers.append(reader)
            self.courses.append(Course(own, reader, self.agreement))

    @property
    def place(self) -> FinitePlace:
        (place,) = {course.plan.finite for course in self.courses}
        assert place is not None
        return place

    def goes_on(self) -> bool:
        while not self.place.over and not self.courses[0].cut:
            offers = [course.offer() for course in self.courses]
            for course in self.courses:
                course.agreed([sum(of_reader) for of_reader in zip(*offers, strict=True)])
        return not self.place.over

    def train(self) -> tuple[Step, Range]:
        step, content, total, weights = self.place.step, {}, 0, 0.0
        positions: list[Range] = []
        passes = set()
        for course, reader in zip(self.courses, self.readers, strict=True):
            batches = course.plan.deal(step)
            passes.add(len(batches))
            for number, batch in enumerate(batches):
                read = reader.read(batches, number)
                total += reader.sum
                weights += batch.weight
                if batch.weight:
                    content[batch.index] = shown(read)
                    assert len(read) == batch.samples
                    positions.append((batch.start, batch.stop))
                else:
                    assert read
                    assert reader.sum == 0
        assert len(passes) == 1
        assert weights == pytest.approx(1.0)
        (consumed,) = join(positions)
        assert consumed == self.courses[0].plan.positions(step)
        return (self.place.epoch, content, total % 2**64), consumed

    def finish_step(self) -> None:
        self.agreement.offers = []
        for course in self.courses:
            course.look_ahead()
        for course in self.courses:
            course.step_finished()

    def saved(self) -> Saved:
        (state,) = {json.dumps(cursor.to_state(course.plan, SEED, self.place.step)) for course in self.courses}
        found = [(rank, reader.states()) for rank, reader in enumerate(self.readers)]
        whole = merged(
            [(rank, own and ReaderStates.from_json(json.loads(json.dumps(own.to_json())))) for rank, own in found]
        )
        assert whole is not None
        return json.loads(state), whole

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


def trained(
    data: Parts,
    plan: StepPlan,
    worlds: list[tuple[int, int]],
    every: int,
    bad: int | None = None,
    processes: list[int] | None = None,
) -> tuple[list[Step], list[Range]]:
    """The steps of the final timeline and their positions: generations of `worlds` (ranks, steps until one is lost), a
    snapshot every `every` steps. The samples from position `bad` on are no good: the run goes back and leaves out the
    step that they are in."""
    history: list[Step] = []
    positions: list[Range] = []
    saved: Saved | None = None
    skips: tuple[Range, ...] = ()
    counts = iter(processes or [])
    lives = [*worlds, (2, 1000), (3, 1000)]
    while lives:
        world, lived = lives.pop(0)
        ranks = Ranks(data, plan, world, saved, skips, next(counts, 0))
        step = 0 if saved is None else saved[0]["step"]
        history, positions = history[:step], positions[:step]
        while lived and ranks.goes_on():
            done, consumed = ranks.train()
            if bad is not None and consumed[0] <= bad < consumed[1]:
                skips = union((*skips, consumed))
                break
            history.append(done)
            positions.append(consumed)
            ranks.finish_step()
            lived -= 1
            if ranks.place.step % every == 0:
                saved = ranks.saved()
        ranks.close()
        if ranks.place.over:
            return history, positions
    raise AssertionError("the run did not come to its end")


@pytest.mark.wide
@settings(max_examples=1000, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.integers(0, 7), min_size=1, max_size=7).map(tuple),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=4),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_every_history_trains_on_what_one_process_would(
    kind: str, global_batch: int, micro_batch: int, lengths: tuple[int, ...], epochs: int,
    worlds: list[tuple[int, int]], every: int, processes: list[int],
) -> None:  # fmt: skip
    data, plan = parts(kind, lengths), planned(global_batch, micro_batch, epochs)
    expected = oracle(data, plan, epochs)
    if {epoch for epoch, *_ in expected} != set(range(epochs)):
        with pytest.raises(UsageError, match="no samples in epoch"):
            trained(data, plan, worlds, every)
        return
    with mock.patch.object(loading, "DataLoader", Ahead):
        history, positions = trained(data, plan, worlds, every, processes=processes)
    assert history == expected
    sizes = [sum(map(len, content.values())) for _, content, _ in expected]
    assert positions == [(sum(sizes[:step]), sum(sizes[: step + 1])) for step in range(len(sizes))]


@pytest.mark.wide
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(2, 7), min_size=1, max_size=5).map(tuple),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), max_size=3),
    st.integers(1, 4),
    st.data(),
)
def test_a_step_that_is_no_good_is_left_out_wherever_it_is(
    kind: str, lengths: tuple[int, ...], worlds: list[tuple[int, int]], every: int, drawn: st.DataObject
) -> None:
    """The last one of an epoch or of the run, too, and one that is an epoch by itself."""
    data, plan = parts(kind, lengths), planned(5, 2, 2)
    expected = oracle(data, plan, 2)
    if {epoch for epoch, *_ in expected} != {0, 1}:
        return
    number = drawn.draw(st.integers(0, len(expected) - 1))
    bad = sum(len(samples) for _, content, _ in expected[:number] for samples in content.values())
    history, _ = trained(data, plan, worlds, every, bad)
    assert history == expected[:number] + expected[number + 1 :]


LENGTHS = (5, 0, 9, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_after_every_step_at_every_size(kind: str) -> None:
    """Also where only some ranks have samples left, and between two epochs; three times in a row."""
    data, plan = parts(kind, LENGTHS), planned(7, 2, 3)
    expected = oracle(data, plan, 3)
    assert len(expected) > 6
    assert len({len(content) for _, content, _ in expected}) > 1
    for world in (1, 3, 6):
        history, _ = trained(data, plan, [(world, 1)] * len(expected), every=1)
        assert history == expected


def test_the_number_of_loading_processes_may_change_within_and_between_epochs() -> None:
    data, plan = parts("packed windows", LENGTHS), planned(7, 2, 3)
    expected = oracle(data, plan, 3)
    history, _ = trained(data, plan, [(2, 3), (1, 4), (3, 1000)], every=2, processes=[2, 3, 1])
    assert history == expected


def samples_of(history: list[Step], epoch: int, reader: int | None = None) -> list[list[int]]:
    """In the order of the steps."""
    return [
        sample
        for of, content, _ in history
        for number, samples in content.items()
        for sample in samples
        if of == epoch and reader in (None, number)
    ]


@pytest.mark.parametrize("kind", ["plain", "windows"])
def test_every_document_is_read_once_in_each_epoch(kind: str) -> None:
    plan = planned(7, 2, 2)
    data = parts(kind, LENGTHS)
    plain = [replace(stages, transform=None) for stages in data.stages]
    history, _ = trained(replace(data, stages=tuple(plain)), plan, [(3, 2), (5, 1)], every=1)
    for epoch in range(2):
        read = samples_of(history, epoch)
        expected = [document for reader in range(4) for document in documents(LENGTHS, reader, epoch)]
        assert sorted(read) == sorted(expected)


def test_packed_tokens_go_on_in_the_next_epoch_and_a_rest_ends_with_the_run() -> None:
    """A reader's documents with their ends, joined over its epochs and cut; at most a sample less a token is left."""
    epochs, tokens = 3, 5
    history, _ = trained(parts("packed", LENGTHS), planned(7, 2, epochs), [(3, 2), (5, 1)], every=1)
    for reader in range(4):
        one = [token for document in documents(LENGTHS, reader, 0) for token in (*document, 0)]
        read: list[int] = []
        for epoch in range(epochs):
            read += [token for sample in samples_of(history, epoch, reader) for token in sample]
            assert read == (one * epochs)[: len(one) * (epoch + 1) // tokens * tokens]


def test_a_mixture_gives_every_sample_of_every_stream_once_in_an_epoch() -> None:
    """The order of each is its own; none is repeated because another one is longer."""

    def of(name: int, number: int) -> Stages:
        return Stages(lambda reader, readers: iter([[name, reader, at] for at in range(number)]))

    data = Parts((of(1, 3), of(2, 17), of(3, 8)), (1.0, 1.0, 6.0))
    history, _ = trained(data, planned(6, 2, 2), [(2, 3), (3, 4)], every=1)
    for epoch in range(2):
        read = samples_of(history, epoch)
        for name, number in ((1, 3), (2, 17), (3, 8)):
            for reader in range(3):
                mine = [sample[2] for sample in read if sample[:2] == [name, reader]]
                assert mine == list(range(number))


def test_an_epoch_without_samples_is_refused_also_where_the_run_resumes_before_it() -> None:
    data, plan = parts("plain", (1, 0)), planned(1, 1, 2)
    for worlds in ([], [(1, 1)]):
        with pytest.raises(UsageError, match="no samples in epoch 1"):
            trained(data, plan, worlds, every=1)


def test_streams_that_are_at_their_end_do_not_change_what_the_others_are_drawn_for() -> None:
    mixture = Parts((Stages(documents),) * 3, (1.0, 2.0, 5.0))  # type: ignore[arg-type]
    orders = [list(mixture.chosen(SEED, 0, count)) for count in range(9000)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    without_last = [next(part for part in order if part != 2) for order in orders]
    assert 5800 < sum(without_last) < 6200


def test_what_comes_after_the_last_epoch_is_not_read() -> None:
    """Nor what comes after the present one, before it is asked for: the source may be for one pass."""
    opened = []

    def open_(reader: int, readers: int) -> Iterator[list[int]]:
        opened.append(reader)
        return iter([[1], [2]])

    data = Parts((Stages(open_),), (1.0,))
    for epochs in (1, None):
        opened.clear()
        ranks = Ranks(data, planned(2, 1, epochs), 1, None, ())
        for _ in range(2):
            assert ranks.goes_on()
            ranks.train()
            ranks.finish_step()
        assert (ranks.place.epoch, ranks.place.over) == (1, epochs == 1)
        assert opened == [0, 1]


def test_the_gradient_is_the_mean_over_the_samples_that_a_step_has() -> None:
    """As the engine averages: over passes and ranks; micro-batches are given their mean."""
    data = parts("plain", LENGTHS)
    for world in (1, 2, 3, 7):
        ranks = Ranks(data, planned(7, 2, 2), world, None, ())
        while ranks.goes_on():
            step, passes = ranks.place.step, 9
            gradient, values = 0.0, []
            for course, reader in zip(ranks.courses, ranks.readers, strict=True):
                batches = course.plan.deal(step)
                for number, batch in enumerate(batches):
                    read = [float(sum(sample) + 1) for sample in reader.read(batches, number)]
                    scale = loss_scale(batch.weight, passes, world)
                    gradient += scale * (sum(read) / len(read)) / (passes * world)
                    values += read if batch.weight else []
            assert gradient == pytest.approx(sum(values) / len(values))
            ranks.finish_step()


def test_a_checkpoint_of_readers_that_began_anew_by_themselves_is_refused() -> None:
    finite, endless = planned(7, 2, 3), replace(planned(7, 2, 3), finite=None)
    with pytest.raises(UsageError, match="epochs of the readers each its own, this run has together"):
        cursor.validate(cursor.to_state(endless, SEED, 0), finite, SEED)
    with pytest.raises(UsageError, match="epochs of the readers together, this run has each its own"):
        cursor.validate(cursor.to_state(finite, SEED, 0), endless, SEED)
    # Of the release before, which had no epochs of streams.
    before = cursor.to_state(endless, SEED, 0)
    del before["data"]["epochs of the readers"]
    cursor.validate(before, endless, SEED)


def test_a_run_may_be_given_more_epochs() -> None:
    data = parts("packed windows", LENGTHS)
    ranks = Ranks(data, planned(7, 2, 1), 2, None, ())
    history = []
    while ranks.goes_on():
        history.append(ranks.train()[0])
        ranks.finish_step()
    saved = ranks.saved()
    ranks = Ranks(data, planned(7, 2, 3), 3, saved, ())
    while ranks.goes_on():
        history.append(ranks.train()[0])
        ranks.finish_step()
    assert history == oracle(data, planned(7, 2, 3), 3)


def test_the_saved_place_is_verified() -> None:
    ranks = Ranks(parts("plain", LENGTHS), planned(7, 2, 2), 2, None, ())
    for _ in range(3):
        assert ranks.goes_on()
        ranks.train()
        ranks.finish_step()
    saved, _ = ranks.saved()
    plan = cursor.from_state(saved, planned(7, 2, 2), BatchSettings(epochs=2))
    here = cursor.to_state(plan, SEED, 3)
    assert here == saved
    agreement: Any = Whole()
    cursor.verify(saved, here, plan, plan.order(SEED), agreement)
    for name in ("epoch", "samples", "position"):
        with pytest.raises(IntegrityError, match="would not continue where the snapshot of step 3 was taken"):
            cursor.verify({**saved, name: saved[name] + 1}, here, plan, plan.order(SEED), agreement)


class Whole:
    """The agreement of a rank that is alone."""

    def sums_later(self, values: list[int]) -> Callable[[], list[int]]:
        return lambda: [value % 2**64 for value in values]

    def any_and_unequal(self, flags: list[bool], values: list[int]) -> tuple[list[bool], list[bool]]:
        return flags, [False] * len(values)
