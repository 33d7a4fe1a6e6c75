"""Ranks that share sequences, through other world sizes and lost ranks; the oracle is one rank with whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cells
import pytest
from cells import AT, BATCH, LAST_STEP, MOVED, WHOLE, Part, Run, assert_every_sample_once, with_a_rank_killed
from crew import Crew
from sequence_model import HEADS
from test_oracle import _assert_ended, _distance

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

# Attention and means are cut in other places, and added up in another order.
ALLOWED = 4e-6

ENGINES = [
    *(pytest.param({"stage": stage}, id=f"stage{stage}") for stage in (0, 1, 2, 3)),
    pytest.param({"stage": 1, "in_loop": True}, id="stage1-in-loop"),
    pytest.param({"stage": 3, "in_loop": True}, id="stage3-in-loop"),
    *(
        pytest.param(each, id=f"stage{each['stage']}-offload", marks=pytest.mark.slow)
        for each in cells.offloaded(1, 2, 3)
    ),
    pytest.param({"engine": "fsdp2"}, id="fsdp2"),
    pytest.param({"engine": "fsdp2", "in_loop": True}, id="fsdp2-in-loop"),
]


@pytest.mark.parametrize("config", ENGINES)
def test_a_run_with_shared_sequences_equals_one_rank_with_whole_ones(
    crew: Crew, tmp_path: Path, config: dict[str, Any]
) -> None:
    whole = through(crew, tmp_path / "whole", config, WHOLE, sp=1)
    shared = through(crew, tmp_path / "shared", config, MOVED)
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state(), shared.state()) <= ALLOWED
    assert_every_sample_once(shared)


def test_all_ranks_share_the_sequences(crew: Crew, tmp_path: Path) -> None:
    """One cell: each rank has a part with one head."""
    whole = through(crew, tmp_path / "whole", {"stage": 2}, WHOLE, sp=1)
    shared = through(crew, tmp_path / "shared", {"stage": 2}, [((0, 1, 2, 3), None)], sp=HEADS)
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state(), shared.state()) <= ALLOWED
    assert [outcome.told["coordinates"] for outcome in shared.outcomes] == [
        {"dp": 0, "sp": s, "tp": 0, "ep": 0, "pp": 0} for s in range(4)
    ]


def test_dropout_is_the_same_at_any_world_size_and_differs_between_parts(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "dropout": 0.3}
    still = through(crew, tmp_path / "still", config, [((0, 1, 2, 3), None)])
    parts = [set(outcome.told["draws"]) for outcome in still.outcomes[:2]]
    assert all(parts), "both parts of the first cell have drawn"
    assert parts[0].isdisjoint(parts[1])
    moved = through(crew, tmp_path / "moved", config, [((0, 1), 3), ((3, 1, 2, 0), 6), ((2, 3), None)])
    assert _distance(still.losses, moved.losses) <= ALLOWED
    assert _distance(still.state(), moved.state()) <= ALLOWED


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
    url, config = tmp_path / "moved", {**plain, "strict": strict}
    moved = Run(url, with_a_rank_killed(crew, url, "sequences.train", config, where, sp=2))
    whole = through(crew, tmp_path / "whole", plain, WHOLE, sp=1)
    assert _distance(whole.after(AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state()) <= ALLOWED


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
    alone = through(crew, tmp_path / "alone", config, WHOLE, sp=1, function="train")
    shared = through(crew, tmp_path / "shared", config, [((0, 1), None)], function="train_and_keep_warnings")
    assert _distance(alone.losses, shared.losses) <= ALLOWED
    assert _distance(alone.state(), shared.state()) <= ALLOWED
    (said,) = [text for text in shared.outcomes[0].told["warnings"] if "shares no sequences" in text]
    assert said.startswith("mesh: {sp: 2}: the script shares no sequences")


def test_cells_read_a_stream_of_epochs(crew: Crew, tmp_path: Path) -> None:
    config = {"stage": 1, "streamed": True}
    whole = through(crew, tmp_path / "whole", config, WHOLE, sp=1)
    shared = through(crew, tmp_path / "shared", config, MOVED)
    assert _distance(whole.losses, shared.losses) <= ALLOWED
    assert _distance(whole.state(), shared.state()) <= ALLOWED
    assert_every_sample_once(shared)


def through(
    crew: Crew,
    url: Path,
    config: Mapping[str, Any],
    parts: Sequence[Part],
    sp: int = 2,
    function: str = "sequences.train",
) -> Run:
    return Run(url, cells.through(crew, url, function, config, parts, sp=sp))
