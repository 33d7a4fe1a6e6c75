"""Collectives of a set-up, of which a worker whose set-up comes later is given what they gave."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _assert_ended, _distance, _undisturbed

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

FUNCTION = "agreements.agrees"
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4}


@pytest.fixture(scope="module")
def still(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _undisturbed(crew, tmp_path_factory.mktemp("still"), {"stage": 1, "dropout": 0.1}, 2)


def config(folder: Path, **more: Any) -> dict[str, Any]:
    shared = {"stage": 1, "dropout": 0.1, "in_loop": True, "ahead": True, "attempt": "first", "url": str(folder)}
    return {**shared, **more}


def newest(folder: Path) -> str:
    return CheckpointStore(str(folder), "run").list()[0].id


def told(outcomes: Any, what: str) -> list[Any]:
    return [outcome.told[what] for outcome in outcomes]


def assert_all_together(crew: Crew, outcomes: Any) -> None:
    """Also the newcomer, the last, which was given the name before it came to what it cannot be given."""
    _assert_ended(outcomes, "finished", LAST_STEP)
    assert len(set(told(outcomes, "name"))) == len(set(told(outcomes, "seed"))) == 1
    assert told(outcomes, "calls") == [2] * len(outcomes)


@pytest.mark.parametrize(("comm", "known"), [("torch", True), ("deepspeed", True), ("torch", False)])
def test_who_stays_is_not_called_again_and_who_joins_is_given_what_they_have(
    crew: Crew, tmp_path: Path, still: Run, comm: str, known: bool
) -> None:
    """While the others train, or where their controller has forgotten it, when they meet. Seen: every change called
    the function again on all ranks."""
    asks = config(tmp_path, counts=True, lists=True, comm=comm)
    begun = crew.run([0, 1, 2], FUNCTION, asks, end_at=2, **MORE)
    assert told(begun, "count") == [[3.0, 6.0]] * 3
    fewer = crew.run([0, 1], FUNCTION, asks, end_at=4, checkpoint=newest(tmp_path), **MORE)
    crew.replace(2)
    joins = {**asks, "place": (2, 3), "attempt": "later", "recording": begun[0].told["recording"] if known else b""}
    crew.members[2].points.clear()
    # The others are in their function, with what they were given.
    crew.begin([0, 1, 2], FUNCTION, joins, checkpoint=newest(tmp_path), **MORE)
    grown = [crew.outcome(number) for number in (0, 1, 2)]
    _assert_ended(grown, "finished", LAST_STEP)
    assert told(grown, "calls") == [1, 1, 1]
    assert told(grown, "name") == ["of generation first, call 1"] * 3
    assert told(grown, "count") == [[3.0, 6.0]] * 3
    assert told(grown, "found") == [["one"] * 3] * 3
    assert told(grown, "each") == [[1.0] * 3] * 3
    assert told(grown, "seed") == [100] * 3
    points = crew.members[2].points
    assert (points.index("set up") < points.index("waits")) is known
    assert _distance(still.losses, Run(tmp_path, [begun, fewer, grown]).losses) <= 8 * FLOOR


def test_one_that_is_called_again_alone_is_given_what_it_had(crew: Crew, tmp_path: Path, still: Run) -> None:
    """Rank 0, since it has asked for its rank. What its set-up costs again is named, and not what it keeps."""
    asks = config(tmp_path, asks_rank=True, slow_s=0.0)
    begun = crew.run([0, 1, 2], FUNCTION, asks, end_at=2, **MORE)
    moved = crew.run([1, 2], FUNCTION, asks, checkpoint=newest(tmp_path), **MORE)
    _assert_ended(moved, "finished", LAST_STEP)
    assert told(moved, "calls") == [2, 1]
    assert told(moved, "kept") == [(2, 1), (1, 1)]
    assert any(
        re.search(r"its set-up has taken \d+\.\d s again; elastic\.keep", point) for point in crew.members[1].points
    )
    assert told(moved, "name") == ["of generation first, call 1"] * 2
    assert told(moved, "seed") == [100] * 2
    assert _distance(still.losses, Run(tmp_path, [begun, moved]).losses) <= 8 * FLOOR


def test_at_another_world_size_sums_are_made_by_all_together(crew: Crew, tmp_path: Path, still: Run) -> None:
    """A sum over three divided by four would be another mean than the others have."""
    asks = config(tmp_path, counts=True)
    begun = crew.run([0, 1, 2], FUNCTION, asks, end_at=2, **MORE)
    joins = {**asks, "place": (3, 4), "recording": begun[0].told["recording"]}
    grown = crew.run([0, 1, 2, 3], FUNCTION, joins, checkpoint=newest(tmp_path), **MORE)
    assert_all_together(crew, grown)
    assert told(grown, "count") == [[4.0, 8.0]] * 4
    assert _distance(still.losses, Run(tmp_path, [begun, grown]).losses) <= 8 * FLOOR


@pytest.mark.parametrize("known", [True, False])
def test_a_set_up_that_is_another_than_that_of_the_others_is_done_by_all_together(
    crew: Crew, tmp_path: Path, still: Run, known: bool
) -> None:
    """Known beforehand, in the generation that it joins; else that one fails, and it is in the next."""
    asks = config(tmp_path)
    begun = crew.run([0, 1, 2], FUNCTION, asks, end_at=2, **MORE)
    (tmp_path / "another").touch()
    crew.replace(2)
    joins = {**asks, "place": (2, 3), "recording": begun[0].told["recording"] if known else b""}
    more = {**MORE, "checkpoint": newest(tmp_path)}
    if not known:
        crew.begin([0, 1, 2], FUNCTION, joins, **more)
        failed = crew.outcome(2).result
        assert failed.kind == "collective_failed"
        assert failed.message.startswith(
            "its collective 2 is all_reduce, where that of the other workers was broadcast"
        )
        for number in (0, 1):
            crew.abort(number, "a rank has failed")
            # It may find its connections closed before it is told that a rank has failed.
            assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    grown = crew.run([0, 1, 2], FUNCTION, joins, **more)
    assert_all_together(crew, grown)
    assert _distance(still.losses, Run(tmp_path, [begun, grown]).losses) <= 8 * FLOOR


def test_what_is_too_much_to_keep_is_agreed_on_by_all_together(crew: Crew, tmp_path: Path, still: Run) -> None:
    """Where a worker joins; those that are left have what it gave."""
    asks = config(tmp_path, big=True)
    begun = crew.run([0, 1, 2], FUNCTION, asks, end_at=2, **MORE)
    assert begun[0].told["recording"] == b""
    fewer = crew.run([0, 1], FUNCTION, asks, end_at=3, checkpoint=newest(tmp_path), **MORE)
    assert not any(point.startswith("left: ") for number in (0, 1) for point in crew.members[number].points)
    crew.replace(2)
    grown = crew.run([0, 1, 2], FUNCTION, asks, checkpoint=newest(tmp_path), **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    assert told(grown, "calls") == [2, 2, 1]
    for number in (0, 1):
        assert any("its collectives gave more than 1 MiB" in point for point in crew.members[number].points)
    assert _distance(still.losses, Run(tmp_path, [begun, fewer, grown]).losses) <= 8 * FLOOR


@pytest.mark.parametrize(("stage", "by_step"), [(2, False), (1, False), (2, True)])
def test_a_loop_that_joins_in_by_a_counter_of_its_own_begins_with_all_others(
    crew: Crew, tmp_path: Path, stage: int, by_step: bool
) -> None:
    """Seen: the newcomer's counter began at 0, so that it waited for the others at another collective than they for it.
    By the run's step all are at the same one, and nobody is called again."""
    still = _undisturbed(crew, tmp_path / "still", {"stage": stage, "dropout": 0.1}, 2)
    logs = config(tmp_path / "moved", stage=stage, by_step=by_step)
    function = "agreements.logs"
    begun = crew.run([0, 1, 2], function, logs, end_at=2, **MORE)
    assert begun[0].result.kind == "ended", begun[0].result
    fewer = crew.run([0, 1], function, logs, end_at=3, checkpoint=newest(tmp_path / "moved"), **MORE)
    assert not any(point.startswith("left: ") for number in (0, 1) for point in crew.members[number].points)
    crew.replace(2)
    grown = crew.run([0, 1, 2], function, logs, checkpoint=newest(tmp_path / "moved"), **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    assert told(grown, "calls") == ([1, 1, 1] if by_step else [2, 2, 1])
    assert _distance(still.losses, Run(tmp_path / "moved", [begun, fewer, grown]).losses) <= 8 * FLOOR


GROUP = "agreements.has_a_group"


@pytest.mark.parametrize("known", [True, False])
def test_a_group_of_all_ranks_is_that_of_every_generation(crew: Crew, tmp_path: Path, still: Run, known: bool) -> None:
    """Seen: a group of gloo beside the world's, as many scripts make it, called all functions again at every change."""
    asks = config(tmp_path)
    begun = crew.run([0, 1, 2], GROUP, asks, end_at=2, **MORE)
    fewer = crew.run([2, 0], GROUP, asks, end_at=4, checkpoint=newest(tmp_path), **MORE)
    crew.replace(1)
    recording = begun[0].told["recording"] if known else b""
    joins = {**asks, "place": (2, 3), "attempt": "later", "recording": recording}
    joined = crew.run([0, 2, 1], GROUP, joins, end_at=6, checkpoint=newest(tmp_path), **MORE)
    points = list(crew.members[1].points)
    # The one that has joined stays, too.
    grown = crew.run([0, 2, 1], GROUP, joins, checkpoint=newest(tmp_path), **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    assert told(grown, "calls") == [1, 1, 1]
    assert told(grown, "name") == ["of generation first"] * 3
    # By step: how many they are, which one this is, and torch's word for them.
    three, two = [0, 1, 2], [0, 1]
    assert grown[0].told["summed"] == {
        **{step: (3, 0, three, "gloo") for step in (1, 2)},
        **{step: (2, 1, two, "gloo") for step in (3, 4)},
        **{step: (3, 0, three, "gloo") for step in range(5, LAST_STEP + 1)},
    }
    assert grown[2].told["summed"] == {step: (3, 2, three, "gloo") for step in range(5, LAST_STEP + 1)}
    assert (points.index("set up") < points.index("waits")) is known
    assert _distance(still.losses, Run(tmp_path, [begun, fewer, joined, grown]).losses) <= 8 * FLOOR


@pytest.mark.parametrize("strict", [True, False])
def test_survivors_of_a_sum_of_the_loops_own_stay_where_a_step_is_a_block(
    crew: Crew, tmp_path: Path, still: Run, strict: bool
) -> None:
    """What the sum would have been is not invented: without a block its failure leaves the function."""
    lost = config(tmp_path, at=3, victim=1, strict=strict)
    crew.begin([0, 1, 2], GROUP, lost, checkpoint_every_steps=1, **MORE)
    crew.reached(1, "there")
    crew.reached(0, "committed step 3")
    crew.lose(1, [0, 2])
    left = [point for number in (0, 2) for point in crew.members[number].points if point.startswith("left: ")]
    crew.replace(1)
    moved = crew.run([2, 0], GROUP, lost, checkpoint=newest(tmp_path), **MORE)
    _assert_ended(moved, "finished", LAST_STEP)
    why = "left: a collective of its own has failed in a step, outside of `with elastic.step():`"
    assert left == ([] if strict else [why, why])
    assert told(moved, "calls") == ([1, 1] if strict else [2, 2])
    assert [outcome.told["summed"][4][:2] for outcome in moved] == [(2, 0), (2, 1)]
    losses = Run(tmp_path, [moved]).losses
    assert _distance({step: still.losses[step] for step in losses}, losses) <= 8 * FLOOR


def test_a_group_that_a_mesh_is_made_of_ends_with_its_generation(crew: Crew, tmp_path: Path, still: Run) -> None:
    """How many ranks there are is in the mesh for good."""
    asks = config(tmp_path, meshes=True)
    begun = crew.run([0, 1, 2], GROUP, asks, end_at=2, **MORE)
    for number in (0, 1):
        (left,) = [point for point in crew.members[number].points if point.startswith("left: ")]
        assert left == "left: it has made or taken process groups, which end with their generation"
    moved = crew.run([0, 1], GROUP, asks, checkpoint=newest(tmp_path), **MORE)
    _assert_ended(moved, "finished", LAST_STEP)
    assert told(moved, "size") == [2, 2]
    assert _distance(still.losses, Run(tmp_path, [begun, moved]).losses) <= 8 * FLOOR


def test_another_group_than_that_of_the_others_is_made_by_all_together(crew: Crew, tmp_path: Path) -> None:
    asks = config(tmp_path)
    begun = crew.run([0, 1], GROUP, asks, end_at=2, **MORE)
    crew.replace(2)
    joins = {**asks, "place": (2, 3), "another": "for an evaluation", "recording": begun[0].told["recording"]}
    grown = crew.run([0, 1, 2], GROUP, joins, checkpoint=newest(tmp_path), **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    # The third had been given nothing before it came to it.
    assert told(grown, "calls") == [2, 2, 1]
    assert told(grown, "size") == [3, 3, 3]
