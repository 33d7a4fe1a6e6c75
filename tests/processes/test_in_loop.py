"""The user's function stays in its loop while ranks are lost and come back; the oracle is the undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Outcome
from test_oracle import BATCH, FLOOR, LAST_STEP, Run, _distance, _undisturbed

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

AT = 4


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_survivors_of_a_killed_rank_stay_in_their_loop(crew: Crew, tmp_path: Path, stage: int, where: str) -> None:
    """3 ranks, one is killed within a step; 2 go on; a newcomer makes them 3 again, which is a planned change."""
    config = {"stage": stage, "dropout": 0.1, "in_loop": True, "url": str(tmp_path / "moved")}
    if where == "backward":
        config["num_workers"] = 1
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 3, "checkpoint_every_steps": 1}
    crew.begin([0, 1, 2], "train_in_loop", {**config, "victim": 1, "at": AT, "where": where}, **more)
    for number in (0, 1, 2):
        crew.reached(number, "there")
    crew.reached(0, f"committed step {AT}")
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    for number in (0, 2):
        crew.abort(number, "rank 1 was lost")
    ended = [crew.outcome(number) for number in (0, 2)]
    crew.replace(1)
    assert {outcome.result.kind for outcome in ended} <= {"ended", "collective_failed"}
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == AT

    shrunk = crew.run([2, 0], "train_in_loop", config, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run([0, 1, 2], "train_in_loop", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)

    left = [point for member in crew.members for point in member.points if point.startswith("left")]
    assert left == [], "a function was left"
    for outcome in (grown[0], grown[2]):
        assert outcome.told["calls"] == 1
        assert outcome.told["abandoned"] == 1, "one step was abandoned, and the loop was told"
        assert outcome.told["world sizes"] == [3, 2, 3]
    still = _undisturbed(crew, tmp_path / "still", {"stage": stage, "dropout": 0.1}, 3)
    moved = Run(tmp_path / "moved", [shrunk, grown])
    # What the killed rank has reported went with it.
    expected = {name: loss for name, loss in still.losses.items() if int(name.removeprefix("loss ")) > AT}
    assert _distance(expected, moved.losses) <= 8 * FLOOR
    assert _distance(still.state, moved.state) <= 8 * FLOOR


def _assert_ended(outcomes: list[Outcome], kind: str, step: int) -> None:
    for outcome in outcomes:
        assert (outcome.result.kind, outcome.result.step) == (kind, step), outcome.result.traceback
