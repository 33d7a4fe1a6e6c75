"""The loader: what is dealt, read, seeded, and refused. Without processes and without DeepSpeed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from elastic.core.data.micro_batches import micro_steps_per_rank
from elastic.core.data.samples import SampleOrder
from elastic.core.data.step_plan import StepPlan, total_samples
from elastic.core.data.steps import StepReport
from elastic.core.errors import GenerationEnded, RunOver, UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.training.data.loader import ElasticLoader, elapsing_epochs
from elastic.training.data.reader import BatchReader, require_map_style
from elastic.training.local import SilentCoordinator
from elastic.training.saving.requests import SaveRequests
from elastic.training.scope import GenerationScope
from elastic.training.session import Stop
from elastic.training.step_loop import StepLoop
from elastic.training.user.state import State


class Recorded:
    """A dataset that remembers what it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.asked.append(index)
        return index, random.random()


class Coordinator(SilentCoordinator):
    def __init__(self, end_at: int | None = None) -> None:
        self.boundaries: list[int] = []
        self.reports: list[StepReport] = []
        self.end_at = end_at

    def boundary(self, step: int) -> Stop | None:
        self.boundaries.append(step)
        return Stop.MEMORY if step == self.end_at else None

    def step_done(self, report: StepReport) -> None:
        self.reports.append(report)


class Saver:
    """In the place of the snapshots: counts what is saved at the end, and what each snapshot would hold of the user's
    own state."""

    def __init__(self, scope: GenerationScope) -> None:
        self.scope = scope
        self.saved: list[int] = []
        self.durable: list[bool] = []
        self.users = 0
        self.snapshots: list[tuple[int, int]] = []
        self.ended_epochs: list[int] = []

    def prepare(self, duration_s: float, applied: bool, ends_epoch: bool) -> float:
        self.snapshots.append((self.scope.step, self.users))
        if ends_epoch:
            self.ended_epochs.append(self.scope.step)
        return 0.0

    def start(self) -> None:
        pass

    def delayed_s(self) -> float:
        return 0.0

    def at_end(self, durable: bool) -> None:
        self.durable.append(durable)
        if self.scope.step not in self.saved:
            self.saved.append(self.scope.step)


class Engine:
    """In the place of the engine: finishes micro-batches."""

    def __init__(self, scope: GenerationScope, steps: StepLoop, saver: Saver) -> None:
        self.scope, self.steps, self.saver = scope, steps, saver
        self.saved, self.durable = saver.saved, saver.durable

    def step(self) -> None:
        progress = self.steps.progress
        assert progress is not None
        progress.backwards += 1
        progress.require_backward()
        progress.finish_batch()
        if progress.complete:
            self.steps.step_finished(StepReport(progress.step + 1, 0.5, progress.positions(), 4, 0.1), applied=True)


Made = tuple[GenerationScope, Engine, ElasticLoader, Recorded]


def make(
    size: int = 10,
    global_batch: int = 4,
    micro_batch: int = 2,
    rank: int = 0,
    world_size: int = 1,
    step: int = 0,
    end_at: int | None = None,
    max_steps: int | None = None,
    epochs: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    bounded: bool = True,
) -> Made:
    """One epoch, unless something else is said or the run is not `bounded`."""
    if bounded and max_steps is None:
        epochs = epochs or 1
    spec = GenerationSpec("run", 1, rank, world_size)
    scope = GenerationScope(spec, Coordinator(end_at), torch.device("cpu"), step=step)
    plan = StepPlan(
        global_batch,
        micro_batch,
        world_size,
        rank,
        size,
        total_samples(size, global_batch, max_steps, epochs),
        micro_steps_per_rank(global_batch, micro_batch, world_size),
    )
    data = Recorded(size)
    reader = BatchReader(data, plan, SampleOrder(size, 0), step, collate_fn or (lambda items: items))
    saver: Any = Saver(scope)
    steps = StepLoop(scope, plan, saver, SaveRequests(scope, State(), saver, apart=False), take_metrics=dict)
    return scope, Engine(scope, steps, saver), ElasticLoader(scope, steps, reader), data


def run(made: Made) -> list[Any]:
    _, engine, loader, _ = made
    seen = []
    for epoch in loader.epochs():
        for batch in epoch:
            seen.append(batch)
            engine.step()
    return seen


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_all_ranks_together_read_every_sample_of_every_epoch_once(
    size: int, global_batch: int, micro_batch: int, world_size: int, epochs: int
) -> None:
    counts = [0] * size
    batches = set()
    for rank in range(world_size):
        made = make(size, global_batch, min(micro_batch, global_batch), rank, world_size, epochs=epochs)
        plan = made[2].plan
        assert plan.last_step is not None
        batches.add(len(run(made)))
        assert sum(plan.batches_in(epoch) for epoch in range(epochs)) in batches
        real = [b for step in range(plan.last_step) for b in plan.deal(step) if b.weight > 0]
        own = [index for b in real for index in SampleOrder(size, 0).indices(b.start, b.stop)]
        for index in own:
            counts[index] += 1
        # Padding repeats what the rank has; only a rank that has nothing yet reads a batch that is not its own.
        assert sorted(own) == sorted(made[3].asked) or plan.deal(0)[0].weight == 0.0
    assert counts == [epochs] * size
    assert len(batches) == 1


def test_it_goes_on_where_the_run_stopped() -> None:
    whole = run(make(epochs=2))
    rest = run(make(epochs=2, step=2))
    assert rest == whole[4:]


def test_random_augmentation_depends_on_the_sample_alone() -> None:
    one = {item for batch in run(make(global_batch=4, micro_batch=2)) for item in batch}
    other = {item for rank in range(2) for batch in run(make(5 + 5, 4, 1, rank, 2)) for item in batch}
    assert one == other


def test_what_the_loop_draws_depends_on_the_micro_batch_alone() -> None:
    def draws(made: Made) -> list[float]:
        drawn = []
        for _ in made[2]:
            drawn.append(random.random())
            made[1].step()
        return drawn

    alone = draws(make(8, 4, 2))
    both = [draws(make(8, 4, 2, rank, 2)) for rank in range(2)]
    assert alone == [both[0][0], both[1][0], both[0][1], both[1][1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_micro_batches_of_a_step_can_be_read_before_they_are_given(rank: int) -> None:
    """Three for two ranks: one of them fills up. What the loop draws stays what it is."""
    wanted = [(batch, random.random()) for batch, _ in _stepping(make(12, 6, 2, rank, 2))]
    made = make(12, 6, 2, rank, 2)
    loader, data = made[2], made[3]
    assert loader.coming() == [], "there is no step yet"
    given, foretold = [], list[Any]()
    for batch, number in _stepping(made):
        given.append((batch, random.random()))
        coming = loader.coming()
        assert loader.coming() == coming
        assert [part.index for part, _ in coming] == [part.index for part in loader.plan.deal(number // 2)][
            number % 2 + 1 :
        ]
        foretold += [batch for _, batch in coming]
    assert given == wanted
    assert foretold == [batch for batch, _ in wanted][1::2]
    assert len(data.asked) == len(set(data.asked))


def _stepping(made: Made) -> Iterator[tuple[Any, int]]:
    for number, batch in enumerate(made[2]):
        yield batch, number
        made[1].step()


def test_every_boundary_is_asked_and_the_end_is_saved() -> None:
    made = make(max_steps=3)
    run(made)
    scope, engine, loader, _ = made
    assert scope.coordinator.boundaries == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert engine.saved == [3]
    assert engine.durable == [True]
    assert loader.finished
    assert list(loader) == []


def test_a_planned_end_saves_exactly_its_step() -> None:
    made = make(max_steps=3, end_at=1)
    with pytest.raises(GenerationEnded, match="planned at step 1"):
        run(made)
    assert made[1].saved == [1]
    assert made[1].durable == [False]
    # Whoever swallowed that does not get any further.
    with pytest.raises(GenerationEnded):
        run(made)


def test_a_run_that_was_over_already_has_no_batches() -> None:
    made = make(max_steps=3, step=3)
    assert run(made) == []
    assert made[2].finished


def test_epochs_are_cut_at_the_first_step_that_begins_in_the_next() -> None:
    made = make(size=10, global_batch=4, micro_batch=4, epochs=3)
    seen = []
    for epoch in made[2].epochs():
        steps = 0
        for _ in epoch:
            steps += 1
            made[1].step()
        seen.append((steps, made[2].epoch))
    # 30 samples: steps begin at 0 4 8 | 12 16 | 20 24 28; the last has two samples.
    assert [steps for steps, _ in seen] == [3, 2, 3]
    assert made[2].finished
    assert made[1].saver.ended_epochs == [3, 5], "the run's end is saved anyway"


def passes(made: Made, rounds: int, told: list[int] | None = None) -> list[int]:
    """Batches in each of `rounds` iterations over the loader; `told` gets what `len(loader)` was before each."""
    counts = []
    for _ in range(rounds):
        if told is not None:
            told.append(len(made[2]))
        count = 0
        for count, _ in enumerate(made[2], 1):  # noqa: B007 - counted
            made[1].step()
        counts.append(count)
    return counts


@pytest.mark.parametrize(
    ("bounds", "expected", "steps"),
    [
        # Steps of four of ten samples begin at 0 4 8 | 12 16 | 20 24 28 | 32 36; two micro-batches each.
        ({"bounded": False}, [6, 4, 6, 4], 10),
        # The last step has the two samples that are left, on one of its micro-batches.
        ({"epochs": 3}, [6, 4, 5, 0], 8),
        ({"epochs": 1}, [5, 0, 0, 0], 3),
        ({"max_steps": 4}, [6, 2, 0, 0], 4),
    ],
)
def test_the_kth_iteration_is_epoch_k(bounds: dict[str, Any], expected: list[int], steps: int) -> None:
    made, told = make(**bounds), list[int]()
    assert passes(made, 4, told) == expected
    assert made[0].step == steps
    assert made[1].steps.returned()
    assert [length for length, count in zip(told, expected, strict=True) if count] == [n for n in expected if n]


@pytest.mark.parametrize("bounds", [{"bounded": False}, {"epochs": 4}])
@pytest.mark.parametrize("step", range(1, 10))
def test_a_function_that_begins_again_trains_what_is_left(bounds: dict[str, Any], step: int) -> None:
    """Wherever a generation ends, the next one's function begins at its top."""
    before, after, whole = make(**bounds), make(step=step, **bounds), make(**bounds)
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for number, made in ((0, before), (1, after), (2, whole)):
        for _ in range(4):
            for batch in made[2]:
                seen[number].append(batch)
                made[1].step()
                if number == 0 and made[0].step == step:
                    break
            if number == 0 and made[0].step == step:
                break
    assert seen[0] + seen[1] == seen[2]
    assert after[0].step == whole[0].step == 10


@pytest.mark.parametrize("step", [0, 2, 4, 7])
def test_elapsing_epochs_begin_at_the_one_that_the_run_is_in(step: int) -> None:
    made = make(step=step, bounded=False)
    numbers = []
    for epoch in elapsing_epochs(made[2], 3):
        numbers.append(epoch)
        for _ in made[2]:
            assert made[2].epoch == epoch
            made[1].step()
    assert numbers == list(range([0, 0, 1, 2][[0, 2, 4, 7].index(step)], 3))
    assert made[0].step == 8


@pytest.mark.parametrize("rank", [0, 1])
def test_earlier_epochs_are_said_to_be_empty_once(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: a worker that joined, which is never rank 0, saved its script's files for epochs that were over; nothing
    was said of that."""
    made = make(step=6, bounded=False, rank=rank, world_size=rank + 1)
    assert passes(made, 4)[:2] == [0, 0]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "this training function began in epoch 2 of the run"
    ]


def test_leaving_an_epoch_early_leaves_out_no_sample() -> None:
    made = make(max_steps=5)
    seen = []
    for _ in range(5):
        for batch in itertools.islice(made[2], 2):
            seen.append(batch)
            made[1].step()
    assert list(made[2]) == []
    assert seen == run(make(max_steps=5))


def test_an_endless_loop_ends_with_the_run() -> None:
    made = make(max_steps=3)

    def endless() -> None:
        while True:
            for _ in made[2]:
                made[1].step()

    with pytest.raises(RunOver, match="after step 3"):
        endless()
    assert made[1].saved == [3]


def test_a_function_without_a_bound_ends_where_it_returns() -> None:
    made = make(bounded=False)
    assert passes(made, 1) == [6]
    assert made[2].steps is None
    assert not made[2].finished
    assert made[1].steps.returned()
    assert made[1].saved == [3]


def test_breaking_between_steps_is_allowed_and_goes_on() -> None:
    made = make(max_steps=3)
    for _ in made[2]:
        made[1].step()
        if made[0].step == 1:
            break
    assert not made[1].steps.returned()
    assert len(run(made)) == 4


def test_the_next_batch_needs_the_step_before() -> None:
    made = make()
    batches = iter(made[2])
    next(batches)
    with pytest.raises(UsageError, match="before engine"):
        next(batches)


def test_leaving_inside_a_step_is_told() -> None:
    made = make()
    next(iter(made[2]))
    # `if step >= number: break`: the step is not begun.
    assert not made[1].steps.returned()
    made = make()
    for _ in made[2]:
        made[1].step()
        break
    with pytest.raises(UsageError, match="in the middle of step 0, after 1 of 2"):
        made[1].steps.returned()


def test_an_epoch_that_nobody_iterates_is_told() -> None:
    made = make(epochs=2)
    with pytest.raises(UsageError, match="was not iterated"):
        list(made[2].epochs())


def test_a_batch_that_the_user_takes_apart_is_whole_again_in_the_padding_pass() -> None:
    # 3 micro-batches on 2 ranks: rank 0 has one and a padding pass.
    made = make(6, 6, 2, 0, 2, collate_fn=lambda items: {"items": list(items)})
    sizes = []
    for batch in made[2]:
        sizes.append(len(batch.pop("items")))
        made[1].step()
    assert sizes == [2, 2]


def test_the_end_of_an_aborted_generation_reaches_the_loop() -> None:
    made = make()
    batches = iter(made[2])
    next(batches)
    made[1].step()
    made[0].end("a node was lost")
    with pytest.raises(GenerationEnded, match="a node was lost"):
        next(batches)


def counts_between_steps(made: Made, until: int = 1 << 30) -> Made:
    """A loop of the user's that counts each step after engine.step(), by itself; it leaves after step `until`."""
    scope, engine, loader, _ = made
    for _ in elapsing_epochs(loader):
        for _ in loader:
            before = scope.step
            engine.step()
            if scope.step > before:
                engine.saver.users += 1
            if scope.step == until:
                return made
        # Between two epochs, and after the last one.
        engine.saver.users += 100
    return made


def test_what_follows_a_step_belongs_to_it() -> None:
    """Steps 1 to 3 are of epoch 0, 4 and 5 of epoch 1: each snapshot holds what was done until the next batch."""
    scope, engine, _, _ = counts_between_steps(make(epochs=2))
    assert engine.saver.snapshots == [(1, 1), (2, 2), (3, 103), (4, 104), (5, 205)]
    assert [report.step for report in scope.coordinator.reports] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert engine.saved == [5]


def test_a_loop_that_is_left_closes_its_step_when_the_function_returns() -> None:
    scope, engine, _, _ = counts_between_steps(make(epochs=2), until=2)
    engine.saver.users += 10
    assert scope.step == 2
    assert engine.saver.snapshots == [(1, 1)]
    assert not engine.steps.returned()
    assert engine.saver.snapshots == [(1, 1), (2, 12)]
    assert engine.saved == [2]
    # The run's last step, without another batch asked for.
    _, engine, _, _ = counts_between_steps(make(epochs=2), until=5)
    assert engine.steps.returned()
    assert engine.saver.snapshots[-1] == (5, 105)
    assert engine.saved == [5]


def test_a_save_that_is_asked_for_after_a_step_is_made_when_it_is_closed() -> None:
    scope, engine, loader, _ = make(max_steps=3)
    for _ in loader:
        engine.step()
        if scope.step == 1 and engine.steps.progress is not None and engine.steps.progress.complete:
            engine.steps.ask_save()
            assert engine.saved == []
            engine.saver.users += 7
    assert engine.saver.snapshots[0] == (1, 7)
    assert engine.saved == [1, 3]
    engine.steps.ask_save()
    assert engine.durable == [True, True, True]


def test_a_save_in_an_epoch_that_a_worker_skips_is_nobody_elses() -> None:
    """The others are in their loop: a collective save would wait for them."""
    _, engine, loader, _ = make(max_steps=5, step=4)
    assert list(loader) == []
    engine.steps.ask_save()
    assert engine.durable == []
    for _ in loader:
        engine.step()
    engine.steps.ask_save()
    assert engine.saved == [5]


def test_a_planned_end_holds_what_followed_its_step() -> None:
    made = make(max_steps=3, end_at=1)
    with pytest.raises(GenerationEnded, match="planned at step 1"):
        counts_between_steps(made)
    assert made[1].saver.snapshots == [(1, 1)]
    assert made[1].saved == [1]


def test_a_generation_that_is_aborted_after_a_step_does_not_close_it() -> None:
    scope, engine, loader, _ = make(max_steps=3)
    for _ in loader:
        engine.step()
        if scope.step == 1:
            break
    scope.end("a node was lost")
    with pytest.raises(GenerationEnded):
        engine.steps.advance()
    assert (scope.step, engine.saver.snapshots) == (1, [])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(), "map-style"),
        (iter([1]), "map-style"),
        ([], "empty"),
    ],
)
def test_data_that_cannot_be_dealt_is_refused(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        require_map_style(data)


@pytest.mark.parametrize(
    ("max_steps", "epochs", "expected"), [(None, None, None), (3, None, 12), (None, 3, 30), (3, 3, 12), (100, 1, 10)]
)
def test_how_long_a_run_is(max_steps: int | None, epochs: int | None, expected: int | None) -> None:
    assert total_samples(10, 4, max_steps, epochs) == expected


def test_a_run_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="max_steps"):
        total_samples(10, 4, 0, None)
