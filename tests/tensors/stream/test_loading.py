"""The reading of ranks that come and go: what is handed out, states of what was handed out, loading processes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_samples import SEED, Ahead, Numbers, added, shown

from elastic.core.data.readers import ReaderStates, merged
from elastic.core.data.step_plan import StepPlan
from elastic.core.errors import IntegrityError, UsageError
from elastic.training.data import cursor
from elastic.training.data.stream import loading
from elastic.training.data.stream.loading import StreamReader, stream_reader
from elastic.training.data.stream.pipeline import Pack, Stages
from elastic.training.data.stream.reader import Parts
from elastic.training.data.stream.repeated import RepeatedSteps

PARTS = Parts((Stages(Numbers, 3, Pack(5, 0), added),), (1.0,))
STEPS = 6


def plan(world_size: int = 1, rank: int = 0, global_batch: int = 7, skips: Any = ()) -> StepPlan:
    """Four micro-batches of 2, 2, 2 and 1 samples."""
    total = STEPS * global_batch
    return StepPlan(global_batch, 2, world_size, rank, None, total, 9, skips, stream=(("pack", "5"),))


def opened(world: StepPlan, step: int, states: ReaderStates | None, processes: int) -> StreamReader:
    factor = 2 if processes else None
    return stream_reader(PARTS, world, SEED, step, states, None, num_workers=processes, prefetch_factor=factor)


Content = dict[int, Any]


def train(
    world_size: int, first: int, last: int, states: ReaderStates | None = None, processes: int = 0, skips: Any = ()
) -> tuple[list[tuple[Content, int]], ReaderStates]:
    """Steps [first, last) at this size: content by micro-batch and sum of each step, and the states after them."""
    plans = [plan(world_size, rank, skips=skips) for rank in range(world_size)]
    readers = [opened(own, first, states, processes) for own in plans]
    history = []
    for step in range(first, last):
        content, total = {}, 0
        for own, reader in zip(plans, readers, strict=True):
            batches = own.deal(step)
            for number, batch in enumerate(batches):
                read = reader.read(batches, number)
                assert read.shape == (batch.samples, 5)
                total += reader.sum
                if batch.weight:
                    content[batch.index] = shown(read)
                else:
                    assert reader.sum == 0
                # What the user does to a batch changes nothing.
                read.zero_()
        history.append((content, total % 2**64))
    found = [(rank, reader.states()) for rank, reader in enumerate(readers)]
    for reader in readers:
        reader.close()
    parts = [(rank, ReaderStates.from_json(json.loads(json.dumps(own.to_json())))) for rank, own in found if own]
    whole = merged(parts)
    assert whole is not None
    return history, whole


WHOLE, END = train(1, 0, STEPS)


@pytest.mark.parametrize("sizes", [[4, 3, 2, 4], [1, 9, 2], [6, 5, 4, 3, 2, 1]])
def test_every_step_is_the_same_at_every_size(sizes: list[int]) -> None:
    history, states = [], None
    for number, size in enumerate(sizes):
        last = STEPS if number == len(sizes) - 1 else number + 1
        part, states = train(size, number, last, states)
        history += part
    assert history == WHOLE
    assert states == END


def test_the_number_of_loading_processes_may_change() -> None:
    first, states = train(2, 0, 2, processes=2)
    second, states = train(1, 2, 4, states, processes=3)
    third, states = train(3, 4, STEPS, states, processes=1)
    assert [*first, *second, *third] == WHOLE
    # Prefetched further than the last step: the states are those of what was handed out.
    assert states == END


@pytest.mark.wide
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(0, 3)), max_size=5))
def test_any_sizes_and_numbers_of_processes_read_the_same(lives: list[tuple[int, int, int]]) -> None:
    history, states = [], None
    with mock.patch.object(loading, "DataLoader", Ahead):
        for world_size, steps, processes in [*lives, (2, STEPS, 1)]:
            first = len(history)
            part, states = train(world_size, first, min(first + steps, STEPS), states, processes)
            history += part
    assert history == WHOLE
    assert states == END


def test_skipped_samples_are_read_by_nobody() -> None:
    _, states = train(2, 0, 2)
    history, _ = train(3, 2, 4, states, skips=((14, 21),))
    assert [content for content, _ in history] == [content for content, _ in WHOLE[3:5]]
    assert [total for _, total in history] == [total for _, total in WHOLE[3:5]]


def test_one_object_for_two_readers_is_refused() -> None:
    shared = [[1, 2], [3]]
    parts = Parts((Stages(lambda reader, readers: shared),), (1.0,))
    reader = stream_reader(parts, plan(), SEED, 0, None, None)
    with pytest.raises(UsageError, match="returned one object for two readers"):
        reader.read(plan().deal(0), 0)


class Alone:
    """The agreement of a single rank."""

    def sums(self, values: list[int]) -> list[int]:
        return [value % 2**64 for value in values]


def test_a_repeated_step_must_read_the_same() -> None:
    repeated: Any = RepeatedSteps({14: WHOLE[2][1]}, Alone())  # type: ignore[arg-type]
    repeated.check(3, 14, WHOLE[2][1])
    repeated.check(4, 21, 12345)
    with pytest.raises(UsageError, match="step 3 is repeated and has read other samples than before"):
        repeated.check(3, 14, WHOLE[2][1] + 1)


def test_states_of_a_manifest_are_all_there() -> None:
    agreement: Any = Alone()
    assert cursor.readers_of(END.to_json(), plan(), agreement) == END
    assert cursor.readers_of(None, replace(plan(), stream=()), agreement) is None
    with pytest.raises(IntegrityError, match="states of none readers"):
        cursor.readers_of(None, plan(), agreement)
    fewer = {"total": 4, "states": {str(reader): END.states[reader] for reader in (0, 1, 3)}}
    with pytest.raises(IntegrityError, match=r"the states of \[2\] are missing"):
        cursor.readers_of(fewer, plan(), agreement)
    with pytest.raises(IntegrityError, match="do not continue from the reader states"):
        # The other rank does not sum up what it owns.
        cursor.readers_of(END.to_json(), plan(2, 0), agreement)


@pytest.mark.parametrize("unequal", [False, True])
def test_ranks_that_read_other_data_are_refused(unequal: bool) -> None:
    class Ranks:
        def any_and_unequal(self, flags: list[bool], values: list[int]) -> tuple[list[bool], list[bool]]:
            told.append(values)
            return [], [unequal]

    told: list[list[int]] = []
    agreement: Any = Ranks()
    if unequal:
        with pytest.raises(UsageError, match="rank 1 has pack 5, epochs of the readers each its own, seed 11"):
            cursor.require_equal(plan(2, 1), SEED, agreement)
    for other in (plan(2, 1), plan(2, 0), replace(plan(2, 0), stream=(("pack", "6"),))):
        with contextlib.suppress(UsageError):
            cursor.require_equal(other, SEED, agreement)
    assert told[-3] == told[-2] != told[-1]


@pytest.mark.parametrize(
    "change",
    [{"micro_batch": 3}, {"stream": (("pack", "6"),)}, {"dataset_size": 9}, {"stream": ()}, {"block": 5}],
)
def test_another_stream_does_not_go_on(change: Any) -> None:
    saved = cursor.to_state(plan(), SEED, 2)
    cursor.validate(saved, plan(3, 1), SEED)
    with pytest.raises(UsageError, match="cannot continue with the same samples"):
        cursor.validate(saved, replace(plan(), **change), SEED)
