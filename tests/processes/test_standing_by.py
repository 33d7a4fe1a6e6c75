"""A worker that stands by for some generations, as one too few for a cell does, and is a rank again: in its loop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from stream_trainings import STEPS_PER_EPOCH
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _assert_ended, _distance, _engine, _undisturbed

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

STREAMED = "stream_trainings.train"


def through(crew: Crew, function: str, config: dict[str, Any], until: tuple[int, int]) -> Run:
    """Three ranks, of which the third stands by between the steps `until`."""
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "engine": _engine(config)}
    generations, checkpoint = [], None
    for who, end_at in (((0, 1, 2), until[0]), ((0, 1), until[1]), ((0, 1, 2), None)):
        outcomes = crew.run(who, function, config, end_at=end_at, checkpoint=checkpoint, **more)
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        checkpoint = CheckpointStore(config["url"], "run").list()[0].id
        generations.append(outcomes)
    return Run(Path(config["url"]), generations)


def left(crew: Crew) -> list[list[str]]:
    return [[point for point in member.points if point.startswith("left")] for member in crew.members[:3]]


@pytest.mark.parametrize("engine", [{"stage": 1}, {"engine": "fsdp2"}], ids=["zero1", "fsdp2"])
def test_within_an_epoch_it_goes_on_where_the_others_are(crew: Crew, tmp_path: Path, engine: dict[str, Any]) -> None:
    plain = {**engine, "dropout": 0.1}
    still = _undisturbed(crew, tmp_path / "still", plain, 2)
    moved = through(crew, "train_in_loop", {**plain, "in_loop": True, "url": str(tmp_path / "moved")}, (1, 3))
    assert left(crew) == [[], [], []]
    assert _distance(still.losses, moved.losses) <= 8 * FLOOR
    assert _distance(still.state, moved.state) <= 8 * FLOOR


def test_over_the_end_of_an_epoch_it_begins_anew(crew: Crew, tmp_path: Path) -> None:
    """Seen: in its loop it came to the collective after that epoch, in which the others had been long ago."""
    config = {"stage": 2, "in_loop": True, "url": str(tmp_path), "place": "after", "by": "elastic.epochs"}
    through(crew, "setting_up.joins_in", config, (2, 6))
    assert left(crew) == [[], [], ["left: it has stood by while the others came to the end of an epoch"]]


@pytest.mark.parametrize("by_step", [False, True])
def test_where_a_counter_decides_on_collectives_all_begin_together(crew: Crew, tmp_path: Path, by_step: bool) -> None:
    """Its counter is behind those of the others."""
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path), "by_step": by_step}
    run = through(crew, "agreements.logs", config, (2, 3))
    calls = [outcome.told["calls"] for outcome in run.outcomes[-3:]]
    assert calls == ([1, 1, 1] if by_step else [2, 2, 2])


def test_a_generation_that_nobody_has_joined_is_no_standing_by(crew: Crew, tmp_path: Path) -> None:
    """A rank is lost in it before it has come: the others have seen all steps, and stay in their loop."""
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3}
    store = CheckpointStore(str(tmp_path), "run")
    _assert_ended(crew.run([0, 1], "agreements.logs", config, end_at=3, **more), "ended", 3)
    crew.members[2].signal(signal.SIGSTOP)
    crew.begin([0, 1, 2], "agreements.logs", config, checkpoint=store.list()[0].id, **more)
    for number in (0, 1):
        crew.in_collective(number)
    crew.replace(2)
    for number in (0, 1):
        crew.abort(number, "rank 2 was lost")
    for number in (0, 1):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    finished = crew.run([0, 1], "agreements.logs", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(finished, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in finished] == [1, 1]


def test_a_newcomer_that_has_made_no_step_has_not_stood_by(crew: Crew, tmp_path: Path) -> None:
    """Another rank is lost in its first step. Of a stream with epochs nobody knows in which of them a step was, so one
    that has stood by is called again."""
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path), "victim": 1, "at": 3, "where": "forward"}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "checkpoint_every_steps": 1}
    _assert_ended(crew.run([0, 1, 2], STREAMED, config, end_at=3, **more), "ended", 3)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.begin([0, 1, 2, 3], STREAMED, config, checkpoint=newest.id, **more)
    crew.reached(1, "there")
    crew.replace(1)
    for number in (0, 2, 3):
        crew.abort(number, "rank 1 was lost")
    for number in (0, 2, 3):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    finished = crew.run([0, 2, 3], STREAMED, config, checkpoint=newest.id, **more)
    _assert_ended(finished, "finished", 2 * STEPS_PER_EPOCH)
    assert [outcome.told["calls"] for outcome in finished] == [1, 1, 1]


def test_a_function_that_began_while_others_stood_by_has_their_results(crew: Crew, tmp_path: Path) -> None:
    """Alone it is rank 0, whose function is called again, and nobody of those that come back has what it agrees on
    then. Seen: two names of one run; and where a counter decides on collectives, all stood still."""
    config = {
        "stage": 1, "in_loop": True, "url": str(tmp_path), "asks_rank": True, "attempt": "first", "dropout": 0.1,
    }  # fmt: skip
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3}
    store = CheckpointStore(str(tmp_path), "run")
    crew.run([0, 1, 2], "agreements.agrees", config, end_at=2, **more)
    crew.run([2], "agreements.agrees", config, end_at=2, checkpoint=store.list()[0].id, **more)
    crew.begin([2, 0, 1], "agreements.agrees", config, checkpoint=store.list()[0].id, **more)
    finished = [crew.outcome(number) for number in (2, 0, 1)]
    _assert_ended(finished, "finished", LAST_STEP)
    assert len({outcome.told["name"] for outcome in finished}) == 1
    assert [outcome.told["calls"] for outcome in finished] == [3, 2, 2]
    assert all("while others stood by" in lines[-1] for lines in left(crew))


def test_a_counter_is_found_out_where_it_has_left_a_worker_behind(crew: Crew, tmp_path: Path) -> None:
    """So far no step had a collective of the loop's own: the function of one that joined began with a counter of its
    own, and the others come to the first one alone. What is noticed, and ended, is that nobody goes on."""
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path), "every": 4, "at": 0, "dropout": 0.1}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1}
    store = CheckpointStore(str(tmp_path), "run")
    crew.run([0, 1], "agreements.logs", config, end_at=2, **more)
    crew.begin([0, 1, 2], "agreements.logs", config, checkpoint=store.list()[0].id, **more)
    crew.reached(0, "committed step 3")
    for number in (0, 1, 2):
        crew.in_collective(number)
    for number in (0, 1, 2):
        crew.abort(number, "nobody has come further")
    assert {crew.outcome(number).result.kind for number in (0, 1, 2)} <= {"ended", "collective_failed"}
    assert store.list()[0].step == 3
    finished = crew.run([0, 1, 2], "agreements.logs", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(finished, "finished", LAST_STEP)
    assert [outcome.told["logged"] for outcome in finished] == [1, 1, 1], "in the fifth step since all began together"
