"""Ranks that share sequences and have different layers, and also share these, through other world sizes and lost ranks;
the oracle is one rank with whole sequences and all layers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from cells import AT, LAST_STEP, WHOLE, Run, assert_every_sample_once, assert_means
from crew import Crew
from test_fsdp2_pipeline import ALLOWED, FSDP2, LOOPED, MORE, STOP, through, through_stages
from test_oracle import _assert_ended, _distance

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes
SLOW = pytest.mark.slow
CONFIG: dict[str, Any] = {**FSDP2, "sequences": True, "tied": True}


def assert_equal(one: Run, moved: Run) -> None:
    assert _distance(one.losses, moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state(one.shapes[0])) <= ALLOWED
    assert_every_sample_once(moved)
    (outcome,) = one.outcomes
    norms = {report.step: report.grad_norm for report in outcome.reports}
    for other in moved.outcomes:
        for report in other.reports:
            assert report.grad_norm == pytest.approx(norms[report.step], rel=1e-4), "tied weights once"
    assert_means(moved.outcomes[-1], one)
    assert moved.outcomes[-1].told["evaluated"] == pytest.approx(outcome.told["evaluated"], abs=ALLOWED)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="1f1b"),
        pytest.param({"tied": False, "fsdp2": {"pipeline_schedule": "GPipe"}}, id="gpipe", marks=SLOW),
        pytest.param(LOOPED, id="interleaved", marks=SLOW),
        pytest.param(
            {**LOOPED, "fsdp2": {"pipeline_schedule": "DualPipeV", "reshard_after_forward": False}},
            id="dualpipev", marks=SLOW,
        ),
    ],
)  # fmt: skip
def test_stages_with_shared_sequences_equal_one_rank_with_all_layers(
    crew: Crew, tmp_path: Path, way: dict[str, Any]
) -> None:
    """A pipeline of two stages of two ranks each; one stage on two ranks; the pipeline on other ranks."""
    config = {**CONFIG, **way}
    one = through(crew, tmp_path / "one", config, WHOLE)
    parts = (((0, 1, 2, 3), 2, 3), ((3, 1), 1, 5), ((3, 1, 2, 0), 2, None))
    moved = through_stages(crew, tmp_path / "moved", config, parts, sp=2)
    assert_equal(one, moved)
    places = [{"dp": 0, "sp": part, "tp": 0, "ep": 0, "pp": stage} for stage in (0, 1) for part in (0, 1)]
    assert [outcome.told["coordinates"] for outcome in moved.outcomes[-4:]] == places


def test_dropout_is_the_same_with_any_stages(crew: Crew, tmp_path: Path) -> None:
    config = {**CONFIG, "dropout": 0.2}
    still = through_stages(crew, tmp_path / "still", config, [((0, 1), 1, None)], sp=2)
    first, second = (set(outcome.told["draws"]) for outcome in still.outcomes)
    assert len(first) == len(second) > LAST_STEP
    assert first.isdisjoint(second), "parts draw their own"
    moved = through_stages(crew, tmp_path / "moved", config, [((2, 0, 1, 3), 2, 4), ((1, 2), 1, None)], sp=2)
    assert _distance(still.losses, moved.losses) <= ALLOWED
    assert _distance(still.state(), moved.state()) <= ALLOWED


@pytest.mark.slow
def test_all_three_at_once_equal_one_rank(eight: Crew, tmp_path: Path) -> None:
    """A cell of 2 x 2 x 2; without stages; the cell on other ranks."""
    config = {**CONFIG, "plan": "all"}
    one = through(eight, tmp_path / "one", config, WHOLE)
    parts = ((range(8), 2, 3), ((3, 6, 1, 0), 1, 5), ((4, 3, 1, 7, 5, 2, 0, 6), 2, None))
    moved = through_stages(eight, tmp_path / "moved", config, parts, tp=2, sp=2)
    assert_equal(one, moved)
    assert [tuple(outcome.told["coordinates"].values()) for outcome in moved.outcomes[-8:]] == [
        (0, part, lane, 0, stage) for stage in (0, 1) for part in (0, 1) for lane in (0, 1)
    ]


def test_a_stage_that_waits_for_a_dead_one_is_released_and_the_run_continues(crew: Crew, tmp_path: Path) -> None:
    """Rank 3, of the last stage, is killed in its first micro-batch: rank 2 waits for its part, rank 1 for a gradient
    of it, and rank 0 for rank 1, while it shares no group with rank 3 but the world's."""
    config = {**CONFIG, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {**MORE, "checkpoint_every_steps": 1, "sp": 2, "anomalies": STOP}
    crew.begin([0, 1, 2, 3], "staged.train", {**config, "victims": [3], "at": AT}, pp=2, **more)
    crew.reached(3, "there")
    crew.reached(0, f"committed step {AT}")
    crew.in_collective(0)
    crew.members[3].signal(signal.SIGKILL)
    crew.members[3].process.join()
    for number in (0, 1, 2):
        crew.abort(number, "rank 3 was lost")
    for number in (0, 1, 2):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(3)
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == AT
    shrunk = crew.run([2, 0], "staged.train", config, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run([0, 1, 2, 3], "staged.train", config, checkpoint=store.list()[0].id, pp=2, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    moved = Run(tmp_path / "moved", [shrunk, grown])
    one = through(crew, tmp_path / "one", CONFIG, WHOLE)
    assert _distance(one.after(AT), moved.losses) <= ALLOWED
    assert _distance(one.state(), moved.state()) <= ALLOWED
