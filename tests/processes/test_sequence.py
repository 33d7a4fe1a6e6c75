"""Ranks that share sequences, through other world sizes and lost ranks; the oracle is one rank with whole sequences."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from sequence_model import HEADS
from test_oracle import Run, _assert_ended, _distance

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

# Two epochs of 37 samples in steps of ten: a step reaches over the epoch's end, and the last one is short.
BATCH, LAST_STEP, SIZE = BatchSettings(epochs=2), 8, 37
# Attention and means are cut in other places, and added up in another order.
ALLOWED = 4e-6
AT = 4

ENGINES = [
    *(pytest.param({"stage": stage}, id=f"stage{stage}") for stage in (0, 1, 2, 3)),
    pytest.param({"stage": 1, "in_loop": True}, id="stage1-in-loop"),
    pytest.param({"stage": 3, "in_loop": True}, id="stage3-in-loop"),
    pytest.param({"engine": "fsdp2"}, id="fsdp2"),
    pytest.param({"engine": "fsdp2", "in_loop": True}, id="fsdp2-in-loop"),
]


@pytest.mark.parametrize("config", ENGINES)
def test_a_run_with_shared_sequences_equals_one_rank_with_whole_ones(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    whole = through(crew, tmp_path / "whole", config, [((0,), None)], sp=1)
    shared = through(crew, tmp_path / "shared", config, [((0, 1, 2, 3), 3), ((2, 0), 5), ((1, 3, 0, 2), None)])
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state, shared.state) <= ALLOWED
    assert_every_sample_once(shared)


def test_all_ranks_share_the_sequences(crew: Crew, tmp_path: Path) -> None:
    """One cell: each rank has a part with one head."""
    whole = through(crew, tmp_path / "whole", {"stage": 2}, [((0,), None)], sp=1)
    shared = through(crew, tmp_path / "shared", {"stage": 2}, [((0, 1, 2, 3), None)], sp=HEADS)
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state, shared.state) <= ALLOWED
    assert [outcome.told["coordinates"] for outcome in shared.outcomes] == [
        {"dp": 0, "sp": s, "tp": 0} for s in range(4)
    ]


def test_dropout_is_the_same_at_any_world_size_and_differs_between_parts(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "dropout": 0.3}
    still = through(crew, tmp_path / "still", config, [((0, 1, 2, 3), None)])
    parts = [set(outcome.told["draws"]) for outcome in still.outcomes[:2]]
    assert all(parts), "both parts of the first cell have drawn"
    assert parts[0].isdisjoint(parts[1])
    moved = through(crew, tmp_path / "moved", config, [((0, 1), 3), ((3, 1, 2, 0), 6), ((2, 3), None)])
    assert _distance(still.losses, moved.losses) <= ALLOWED
    assert _distance(still.state, moved.state) <= ALLOWED


@pytest.mark.parametrize(
    ("plain", "where", "strict"),
    [
        ({"stage": 1}, "forward", False),
        ({"stage": 1}, "mean", False),
        ({"stage": 2}, "backward", False),
        ({"stage": 3}, "mean", False),
        ({"stage": 1}, "mean", True),
        ({"engine": "fsdp2"}, "mean", False),
    ],
)
def test_survivors_of_a_killed_rank_stay_in_their_loop(
    crew: Crew, tmp_path: Path, plain: dict[str, Any], where: str, strict: bool
) -> None:
    """4 ranks in two cells; one is killed within a step. One cell continues, with a survivor from each of the two."""
    config = {**plain, "in_loop": True, "strict": strict, "url": str(tmp_path / "moved")}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "checkpoint_every_steps": 1, "sp": 2}
    more["engine"] = plain.get("engine", "deepspeed")
    crew.begin([0, 1, 2, 3], "sequences.train", {**config, "victim": 1, "at": AT, "where": where}, **more)
    for number in range(4):
        crew.reached(number, "there")
    crew.reached(0, f"committed step {AT}")
    crew.members[1].signal(signal.SIGKILL)
    crew.members[1].process.join()
    for number in (0, 2, 3):
        crew.abort(number, "rank 1 was lost")
    for number in (0, 2, 3):
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")
    crew.replace(1)
    store = CheckpointStore(str(tmp_path / "moved"), "run")
    assert store.list()[0].step == AT

    shrunk = crew.run([3, 0], "sequences.train", config, checkpoint=store.list()[0].id, end_at=AT + 2, **more)
    _assert_ended(shrunk, "ended", AT + 2)
    grown = crew.run([0, 1, 2, 3], "sequences.train", config, checkpoint=store.list()[0].id, **more)
    _assert_ended(grown, "finished", LAST_STEP)
    left = [point for member in crew.members for point in member.points if point.startswith("left")]
    assert left == [], "a function was left"
    for rank in (0, 2, 3):
        assert (grown[rank].told["calls"], grown[rank].told["abandoned"]) == (1, 1)

    whole = through(crew, tmp_path / "whole", plain, [((0,), None)], sp=1)
    moved = Run(tmp_path / "moved", [shrunk, grown])
    expected = {name: loss for name, loss in whole.losses.items() if int(name.removeprefix("loss ")) > AT}
    assert _distance(expected, moved.losses) <= ALLOWED
    assert _distance(whole.state, moved.state) <= ALLOWED


def test_a_function_that_holds_the_group_is_called_again(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "in_loop": True, "url": str(tmp_path)}
    more: dict[str, Any] = {"batch": BATCH, "max_world_size": 4, "sp": 2}
    _assert_ended(crew.run([0, 1], "sequences.holds_the_group", config, end_at=2, **more), "ended", 2)
    reason = "left: it has made or taken process groups, which end with their generation"
    assert all(reason in crew.members[number].points for number in (0, 1))
    newest = CheckpointStore(str(tmp_path), "run").list()[0]
    again = crew.run([0, 1], "sequences.holds_the_group", config, checkpoint=newest.id, **more)
    _assert_ended(again, "finished", LAST_STEP)


def test_exchanges_are_in_the_ledger(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run(
        range(4), "sequences.train", {"stage": 1, "url": str(tmp_path)}, batch=BATCH, max_world_size=4, sp=2
    )
    _assert_ended(outcomes, "finished", LAST_STEP)
    (report,) = [report for report in outcomes[0].reports if report.step == 2]
    calls = {(use.op, use.axis): use.calls for use in report.collectives}
    # 3 micro-batches: query, key, value and output, forth and back; the loss's sum, its gradient and the tokens.
    assert calls["all_to_all_single", "sp"] == 3 * 8
    assert calls["all_reduce", "sp"] == 3 * 3


def test_a_script_that_shares_no_sequences_is_told_so_and_trains_the_same(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1}
    alone = through(crew, tmp_path / "alone", config, [((0,), None)], sp=1, function="train")
    shared = through(crew, tmp_path / "shared", config, [((0, 1), None)], function="train_and_keep_warnings")
    assert _distance(alone.losses, shared.losses) <= ALLOWED
    assert _distance(alone.state, shared.state) <= ALLOWED
    (said,) = [text for text in shared.outcomes[0].told["warnings"] if "shares no sequences" in text]
    assert said.startswith("mesh: {sp: 2}: the script shares no sequences")


def test_cells_read_a_stream_of_epochs(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "streamed": True}
    whole = through(crew, tmp_path / "whole", config, [((0,), None)], sp=1)
    shared = through(crew, tmp_path / "shared", config, [((0, 1, 2, 3), 3), ((2, 0), 5), ((1, 3, 0, 2), None)])
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state, shared.state) <= ALLOWED
    assert_every_sample_once(shared)


def through(
    crew: Crew,
    url: Path,
    config: Mapping[str, Any],
    parts: list[tuple[tuple[int, ...], int | None]],
    sp: int = 2,
    function: str = "sequences.train",
) -> Run:
    """A run in generations of these members, each up to its step (None: the end)."""
    store, generations, checkpoint = CheckpointStore(str(url), "run"), [], None
    for who, end_at in parts:
        outcomes = crew.run(
            who,
            function,
            {**config, "url": str(url)},
            end_at=end_at,
            batch=BATCH,
            max_world_size=4,
            checkpoint=checkpoint,
            engine=str(config.get("engine", "deepspeed")),
            sp=sp,
        )
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        assert all(outcome.clean for outcome in outcomes)
        checkpoint = store.list()[0].id
        generations.append(outcomes)
    return Run(url, generations)


def assert_every_sample_once(run: Run) -> None:
    positions = Counter(
        position
        for outcome in run.outcomes
        for report in outcome.reports
        for start, stop in report.positions
        for position in range(start, stop)
    )
    assert positions == dict.fromkeys(range(2 * SIZE), 1)
    assert torch.isfinite(torch.stack(list(run.losses.values()))).all()
