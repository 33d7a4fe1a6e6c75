"""Epochs of a stream under real engines in real processes: other world sizes and killed ranks near an epoch's end.

The oracle of what is read is one process that reads everything in one pass; that of the losses is the undisturbed run.
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import stream_trainings
from crew import Crew, Outcome
from stream_trainings import STEPS_PER_EPOCH
from test_oracle import FLOOR, Run, _assert_ended, _distance

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

EPOCHS = 2
LAST_STEP = EPOCHS * STEPS_PER_EPOCH
TRAIN = "stream_trainings.train"
# `_distance` is relative; each change of the world size changes the order of additions. Seen: 1e-7.
ALLOWED = 8 * FLOOR


def more(config: dict[str, Any], **spec: Any) -> dict[str, Any]:
    engine = config.get("engine", "deepspeed")
    return {"batch": BatchSettings(epochs=EPOCHS), "max_world_size": 4, "engine": engine, **spec}


def undisturbed(crew: Crew, url: Path, config: dict[str, Any], world_size: int) -> Run:
    outcomes = crew.run(range(world_size), TRAIN, {**config, "url": str(url)}, **more(config))
    _assert_ended(outcomes, "finished", LAST_STEP)
    return Run(url, [outcomes])


def assert_read_as_by_one_process(outcomes: list[Outcome], first: int = 0) -> None:
    """Every step from `first` on: its samples, and the sum over their content."""
    sums, sizes = stream_trainings.oracle(EPOCHS)
    assert len(sums) == LAST_STEP
    content: Counter[int] = Counter()
    samples: Counter[int] = Counter()
    positions: list[int] = []
    for report in (report for outcome in outcomes for report in outcome.reports):
        content[report.step] += report.content
        samples[report.step] += report.samples
        positions += [position for start, stop in report.positions for position in range(start, stop)]
    steps = range(first, LAST_STEP)
    assert [content[step + 1] % 2**64 for step in steps] == sums[first:]
    assert [samples[step + 1] for step in steps] == sizes[first:]
    assert sorted(positions) == list(range(sum(sizes[:first]), sum(sizes)))


@pytest.mark.parametrize(
    "config",
    [{"stage": 2}, {"stage": 3, "num_workers": 2}, {"engine": "fsdp2"}, {"stage": 1, "in_loop": True}],
    ids=str,
)
def test_a_run_through_other_world_sizes_equals_the_undisturbed_run(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    """The size changes in the steps before an epoch's end, where most ranks have no samples, and at the end itself."""
    still = undisturbed(crew, tmp_path / "four", config, 4)
    other = undisturbed(crew, tmp_path / "one", config, 1)
    store, generations, checkpoint = CheckpointStore(str(tmp_path / "moved"), "run"), [], None
    changes = [((0, 1, 2, 3), 4), ((2, 0, 3), 5), ((3, 2), 6), ((1, 3, 0, 2), 9), ((1, 0), 11), ((2, 1, 3), None)]
    for who, end_at in changes:
        told = {**config, "url": str(tmp_path / "moved")}
        outcomes = crew.run(who, TRAIN, told, end_at=end_at, **more(config, checkpoint=checkpoint))
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        checkpoint = store.list()[0].id
        generations.append(outcomes)
    moved = Run(tmp_path / "moved", generations)
    assert generations[-1][0].told["epochs"] == [0, 1]
    for run in (other, moved):
        assert _distance(still.losses, run.losses) <= ALLOWED
        assert _distance(still.state, run.state) <= ALLOWED
    for run in (still, other, moved):
        assert_read_as_by_one_process(run.outcomes)


def killed(crew: Crew, config: dict[str, Any], saved: int, spec: dict[str, Any]) -> list[int]:
    """Four begin; the victim of `config` is killed where that says, its process replaced. The others, whose newest
    checkpoint is that of step `saved`."""
    crew.begin(range(4), TRAIN, config, **spec)
    for number in range(4):
        crew.reached(number, "there")
    crew.reached(0, f"committed step {saved}")
    victim = config["victim"]
    crew.members[victim].signal(signal.SIGKILL)
    crew.members[victim].process.join()
    survivors = [number for number in range(4) if number != victim]
    for number in survivors:
        crew.abort(number, f"rank {victim} was lost")
    ended = [crew.outcome(number) for number in survivors]
    crew.replace(victim)
    assert {outcome.result.kind for outcome in ended} <= {"ended", "collective_failed"}
    assert CheckpointStore(config["url"], "run").list()[0].step == saved
    return survivors


@pytest.mark.parametrize(
    ("at", "victim", "where"),
    [
        # The epoch's last step, which only rank 3 has samples for.
        (STEPS_PER_EPOCH - 1, 3, "backward"),
        (STEPS_PER_EPOCH - 1, 0, "forward"),
        # Ranks have agreed on what comes next when they come to the optimizer.
        (STEPS_PER_EPOCH - 1, 1, "step"),
        (STEPS_PER_EPOCH - 2, 2, "backward"),
        # The first step of the next epoch; the last one of the run.
        (STEPS_PER_EPOCH, 3, "forward"),
        (LAST_STEP - 1, 3, "step"),
    ],
)
@pytest.mark.parametrize("in_loop", [True, False], ids=["in loop", "called again"])
def test_a_rank_that_is_killed_near_the_end_of_an_epoch(
    crew: Crew, tmp_path: Path, at: int, victim: int, where: str, in_loop: bool
) -> None:
    """Three continue from the step before, then four again, a planned change in the next step."""
    config: dict[str, Any] = {"stage": 1, "in_loop": in_loop, "url": str(tmp_path / "moved")}
    spec = more(config, checkpoint_every_steps=1)
    survivors = killed(crew, {**config, "at": at, "victim": victim, "where": where}, at, spec)
    store, generations = CheckpointStore(str(tmp_path / "moved"), "run"), []
    end_at = at + 1 if at + 1 < LAST_STEP else None
    shrunk = crew.run(survivors[::-1], TRAIN, config, checkpoint=store.list()[0].id, end_at=end_at, **spec)
    generations.append(shrunk)
    if end_at is not None:
        _assert_ended(shrunk, "ended", at + 1)
        generations.append(crew.run(range(4), TRAIN, config, checkpoint=store.list()[0].id, **spec))
    _assert_ended(generations[-1], "finished", LAST_STEP)
    if in_loop:
        assert shrunk[0].told["calls"] == 1
    moved = Run(tmp_path / "moved", generations)
    assert_read_as_by_one_process(moved.outcomes, at)
    still = undisturbed(crew, tmp_path / "still", {"stage": 1}, 4)
    expected = {name: loss for name, loss in still.losses.items() if int(name.removeprefix("loss ")) > at}
    assert _distance(expected, moved.losses) <= ALLOWED
    assert _distance(still.state, moved.state) <= ALLOWED


@pytest.mark.parametrize("saved", [STEPS_PER_EPOCH - 2, STEPS_PER_EPOCH])
def test_a_loop_is_left_where_the_run_goes_back_over_the_end_of_an_epoch(
    crew: Crew, tmp_path: Path, saved: int
) -> None:
    """Its loop is in the second epoch; what comes after the first one has run, and must run again."""
    config: dict[str, Any] = {"stage": 1, "in_loop": True, "url": str(tmp_path / "moved")}
    spec = more(config, checkpoint_every_steps=saved)
    at = STEPS_PER_EPOCH + 1
    survivors = killed(crew, {**config, "at": at, "victim": 2, "where": "backward"}, saved, spec)
    checkpoint = CheckpointStore(config["url"], "run").list()[0].id
    outcomes = crew.run(survivors, TRAIN, config, checkpoint=checkpoint, **spec)
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in outcomes] == [2 if saved < STEPS_PER_EPOCH else 1] * 3
    assert outcomes[0].told["epochs"] == [0, 1]
    assert_read_as_by_one_process(outcomes, saved)


@pytest.mark.parametrize("end", [STEPS_PER_EPOCH, LAST_STEP])
def test_what_comes_after_an_epoch_is_done_again_in_the_loop(crew: Crew, tmp_path: Path, end: int) -> None:
    """A rank is lost in it, in `with elastic.step():`; nobody knows how long the epoch of a stream is."""
    config: dict[str, Any] = {"stage": 1, "in_loop": True, "after": True, "url": str(tmp_path)}
    spec = more(config, checkpoint_every_steps=1)
    survivors = killed(crew, {**config, "at": end, "victim": 1, "where": "after"}, end - 1, spec)
    checkpoint = CheckpointStore(config["url"], "run").list()[0].id
    outcomes = crew.run(survivors, TRAIN, config, checkpoint=checkpoint, **spec)
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in outcomes] == [1, 1, 1]
    assert [outcome.told["after"] for outcome in outcomes] == [[STEPS_PER_EPOCH, LAST_STEP]] * 3
    assert outcomes[0].told["epochs"] == [0, 1]
    assert_read_as_by_one_process(outcomes, end - 1)
