"""The user's function is called before its process has a generation; the oracle is a function that is not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from setting_up import ASKS
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _assert_ended, _distance, _undisturbed

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

SETS_UP = "setting_up.sets_up_ahead"
STEP = "elastic, for its step"
CONFIG: dict[str, Any] = {"stage": 1, "dropout": 0.1, "in_loop": True, "ahead": True}
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4}


@pytest.fixture(scope="module")
def still(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _undisturbed(crew, tmp_path_factory.mktemp("still"), {"stage": 1, "dropout": 0.1}, 2)


WAITED_FOR = "a thread that is waited for"


@pytest.mark.parametrize("asks", [one for one in ASKS if one not in (WAITED_FOR, STEP)])
def test_a_set_up_that_asks_is_answered_as_in_a_generation(crew: Crew, tmp_path: Path, still: Run, asks: str) -> None:
    config = {**CONFIG, "asks": asks, "url": str(tmp_path)}
    outcomes = crew.run([0, 1], SETS_UP, config, **MORE)
    _assert_ended(outcomes, "finished", LAST_STEP)
    nothing = [None, None]
    told = {
        "world size": [2, 2],
        "nothing": nothing,
        "not, and copies all variables": nothing,
        "a thread": [[0], [1]],
    }.get(asks, [0, 1])
    assert [outcome.told["rank"] for outcome in outcomes] == told
    for number in (0, 1):
        points = crew.members[number].points
        assert points.index("set up") < points.index("waits"), "the model was built before it waited"
        assert points.count("waits") == outcomes[number].told["calls"] == 1
    assert _distance(still.losses, Run(tmp_path, [outcomes]).losses) <= 8 * FLOOR


@pytest.mark.parametrize("asks", ["nothing", "variable", "torch", "deepspeed.init_distributed", "elastic", STEP])
def test_a_survivor_that_becomes_rank_0_is_told_where_it_has_asked(
    crew: Crew, tmp_path: Path, still: Run, asks: str
) -> None:
    """Seen: with rank 0's node went whatever a script does on rank 0 (`master_process = rank == 0`): its log, its
    evaluation, its files; nobody did that from there on."""
    config = {**CONFIG, "asks": asks, "url": str(tmp_path)}
    begun = crew.run([0, 1, 2], SETS_UP, config, end_at=2, **MORE)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    moved = crew.run([1, 2], SETS_UP, config, checkpoint=newest.id, **MORE)
    _assert_ended(moved, "finished", LAST_STEP)
    ranks, calls = zip(*[(outcome.told["rank"], outcome.told["calls"]) for outcome in moved], strict=True)
    stay = {"nothing": ((None, None), (1, 1)), STEP: ((0, 0), (1, 1))}
    assert (ranks, calls) == stay.get(asks, ((0, 2), (2, 1)))
    assert _distance(still.losses, Run(tmp_path, [begun, moved]).losses) <= 8 * FLOOR


TELL = ["variable", "elastic", "torch", "deepspeed.comm", "deepspeed.init_distributed", "world size"]


@pytest.mark.parametrize("asks", TELL)
def test_a_worker_that_joins_is_told_its_place_before(crew: Crew, tmp_path: Path, still: Run, asks: str) -> None:
    """Its set-up goes on, while the others train."""
    config = {**CONFIG, "asks": asks, "url": str(tmp_path)}
    begun = crew.run([0, 1], SETS_UP, config, end_at=2, **MORE)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.replace(2)
    # Ranks go where their state is: this is not the one that it gets.
    grown = crew.run([0, 2, 1], SETS_UP, {**config, "place": (2, 3)}, checkpoint=newest.id, **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    told = grown[1].told
    assert (told["calls"], told["rank"]) == (1, 3 if asks == "world size" else 2)
    points = crew.members[2].points
    assert points.index("set up") < points.index("asked") < points.index("waits")
    assert _distance(still.losses, Run(tmp_path, [begun, grown]).losses) <= 8 * FLOOR


@pytest.mark.parametrize(("who", "place", "rank"), [([0, 1, 2], (2, 4), 2), ([2, 0, 1], (2, 3), 0)])
def test_a_place_that_is_another_one_is_told_again(
    crew: Crew, tmp_path: Path, still: Run, who: list[int], place: tuple[int, int], rank: int
) -> None:
    """Another world size, or rank 0, which does what a script does once."""
    config = {**CONFIG, "asks": "variable", "url": str(tmp_path)}
    begun = crew.run([0, 1], SETS_UP, config, end_at=2, **MORE)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    crew.replace(2)
    grown = crew.run(who, SETS_UP, {**config, "place": place}, checkpoint=newest.id, **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    told = grown[who.index(2)].told
    assert (told["calls"], told["rank"]) == (2, rank)
    (left,) = [point for point in crew.members[2].points if point.startswith("left: ")]
    assert left == f"left: it was told that it would be rank 2 of {place[1]}, and is rank {rank} of 3"
    assert _distance(still.losses, Run(tmp_path, [begun, grown]).losses) <= 8 * FLOOR


def test_another_share_of_a_cell_is_told_again(crew: Crew, tmp_path: Path) -> None:
    """Rank 2 has other parts of sequences than rank 3, which both were told to be."""
    config, more = {**CONFIG, "asks": "variable", "url": str(tmp_path)}, {**MORE, "sp": 2}
    begun = crew.run([0, 1], SETS_UP, config, end_at=2, **more)
    _assert_ended(begun, "ended", 2)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    for number in (2, 3):
        crew.replace(number)
    grown = crew.run(range(4), SETS_UP, {**config, "place": (3, 4)}, checkpoint=newest.id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    assert [(outcome.told["calls"], outcome.told["rank"]) for outcome in grown[2:]] == [(2, 2), (1, 3)]
    left = [point for point in crew.members[2].points if point.startswith("left: ")]
    assert left == ["left: it was told that it would be rank 3 of 4, and is rank 2 of 4"]


def test_the_engines_own_initialize_is_answered(crew: Crew, tmp_path: Path, still: Run) -> None:
    outcomes = crew.run([0, 1], SETS_UP, {**CONFIG, "native": True, "url": str(tmp_path)}, **MORE)
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert _distance(still.losses, Run(tmp_path, [outcomes]).losses) <= 8 * FLOOR


def test_what_cannot_be_done_ahead_is_done_in_a_generation(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run([0, 1], SETS_UP, {**CONFIG, "raises": 1, "url": str(tmp_path)}, **MORE)
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in outcomes] == [2, 2]


def test_two_threads_that_wait_for_each_other_are_told(crew: Crew, tmp_path: Path, still: Run) -> None:
    outcomes = crew.run([0, 1], SETS_UP, {**CONFIG, "asks": WAITED_FOR, "url": str(tmp_path)}, **MORE)
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert [(outcome.told["calls"], outcome.told["rank"]) for outcome in outcomes] == [(2, 0), (2, 1)]
    assert _distance(still.losses, Run(tmp_path, [outcomes]).losses) <= 8 * FLOOR


def test_what_fails_in_a_generation_too_is_the_users_error(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run([0, 1], SETS_UP, {**CONFIG, "raises": 2, "url": str(tmp_path)}, **MORE)
    told = {(outcome.result.kind, outcome.result.message) for outcome in outcomes}
    # Also where the rank that comes first has failed while the other one still connects to it.
    assert told == {("user_error", "the set-up has failed")}


def test_a_function_that_needs_no_generation_has_been_in_one(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run([0, 1], "setting_up.needs_nothing", {**CONFIG, "url": str(tmp_path)}, **MORE)
    assert [outcome.told["calls"] for outcome in outcomes] == [1, 1]
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert all("has returned without elastic.initialize" in outcome.result.message for outcome in outcomes)


@pytest.mark.parametrize("prepares", [False, True])
def test_a_generation_that_ends_while_it_is_joined_costs_no_set_up(
    crew: Crew, tmp_path: Path, still: Run, prepares: bool
) -> None:
    """Seen: a script that prepares its own DataLoader waited at that call, without a model to rehearse."""
    config = {**CONFIG, "prepares": prepares, "url": str(tmp_path)}
    crew.begin([0, 1, 2], SETS_UP, config, **MORE)
    crew.members[2].signal(signal.SIGKILL)
    crew.members[2].process.join()
    for number in (0, 1):
        crew.reached(number, "waits")
        points = crew.members[number].points
        assert not prepares or points.index("prepared") < points.index("waits")
    for number in (0, 1):
        crew.abort(number, "rank 2 was lost")
    for number in (0, 1):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(2)
    outcomes = crew.run([0, 1], SETS_UP, config, **MORE)
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert [outcome.told["calls"] for outcome in outcomes] == [1, 1]
    assert _distance(still.losses, Run(tmp_path, [outcomes]).losses) <= 8 * FLOOR
