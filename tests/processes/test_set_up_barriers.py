"""Barriers in a set-up are between the ranks that are in their set-up, and nobody is called again for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _assert_ended, _distance, _undisturbed

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

FUNCTION = "downloads.downloads"
CONFIG: dict[str, Any] = {"stage": 1, "dropout": 0.1, "in_loop": True, "ahead": True}
MORE: dict[str, Any] = {"batch": BATCH, "max_world_size": 4}


@pytest.fixture(scope="module")
def still(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _undisturbed(crew, tmp_path_factory.mktemp("still"), {"stage": 1, "dropout": 0.1}, 2)


def calls(outcomes: Any) -> list[int]:
    return [outcome.told["calls"] for outcome in outcomes]


@pytest.mark.parametrize("barrier", ["torch", "deepspeed"])
def test_who_stays_is_not_called_again_and_who_joins_waits_for_nobody(
    crew: Crew, tmp_path: Path, still: Run, barrier: str
) -> None:
    """Seen: every change called the function again on all ranks; a worker that joined did its set-up in the pause."""
    config = {**CONFIG, "barrier": barrier, "url": str(tmp_path)}
    store = CheckpointStore(str(tmp_path), "run")
    begun = crew.run([0, 1, 2], FUNCTION, config, end_at=2, **MORE)
    assert [outcome.told["rank"] for outcome in begun] == [0, 1, 2]
    fewer = crew.run([0, 1], FUNCTION, config, end_at=4, checkpoint=store.list()[0].id, **MORE)
    crew.replace(2)
    joins = {**config, "place": (2, 3)}
    grown = crew.run([0, 1, 2], FUNCTION, joins, checkpoint=store.list()[0].id, **MORE)
    _assert_ended(grown, "finished", LAST_STEP)
    assert calls(grown) == [1, 1, 1]
    points = crew.members[2].points
    assert points.index("set up") < points.index("waits")
    assert _distance(still.losses, Run(tmp_path, [begun, fewer, grown]).losses) <= 8 * FLOOR


def test_one_that_is_called_again_alone_waits_for_nobody(crew: Crew, tmp_path: Path, still: Run) -> None:
    """Rank 0, since it has asked for its rank."""
    config = {**CONFIG, "barrier": "torch", "url": str(tmp_path)}
    begun = crew.run([0, 1, 2], FUNCTION, config, end_at=2, **MORE)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    moved = crew.run([1, 2], FUNCTION, config, checkpoint=newest.id, **MORE)
    _assert_ended(moved, "finished", LAST_STEP)
    assert calls(moved) == [2, 1]
    assert _distance(still.losses, Run(tmp_path, [begun, moved]).losses) <= 8 * FLOOR


def test_those_that_are_called_again_meet(crew: Crew, tmp_path: Path, still: Run) -> None:
    """Processes of an earlier attempt are gone: the files that rank 0 makes may be, too."""
    config = {**CONFIG, "barrier": "torch", "url": str(tmp_path)}
    begun = crew.run([0, 1, 2], FUNCTION, config, end_at=2, **MORE)
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    for number in (0, 1):
        crew.replace(number)
    (tmp_path / "made").unlink()
    (tmp_path / "arrived").unlink()
    # Rank 2 of before stays in its loop.
    moved = crew.run([0, 1, 2], FUNCTION, config, checkpoint=newest.id, **MORE)
    _assert_ended(moved, "finished", LAST_STEP)
    assert calls(moved) == [1, 1, 1]
    assert _distance(still.losses, Run(tmp_path, [begun, moved]).losses) <= 8 * FLOOR
