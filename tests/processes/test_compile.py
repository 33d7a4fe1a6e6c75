"""Compiled models through other world sizes; the oracle is the same model, not compiled, undisturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cells import AT, WHOLE, Part, with_a_rank_killed
from cells import Run as Cells
from crew import Crew
from test_fsdp2_experts import DOUBLE, EXACT, assert_equal
from test_fsdp2_experts import through as through_experts
from test_oracle import BATCH, LAST_STEP, Run, _assert_ended, _distance

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

# Compiled graphs add in another order.
ALLOWED = 4e-6
# Each way and each engine; the other combinations are slow.
_CHOSEN = ((0, "wrapped"), (1, "part"), (2, "engine"), (3, "in place"))
WAYS = [
    *(
        pytest.param({"stage": stage}, by, marks=[] if (stage, by) in _CHOSEN else [pytest.mark.slow])
        for stage in (0, 1, 2, 3)
        for by in ("wrapped", "part", "in place", "engine")
        if stage < 3 or by in ("in place", "engine")
    ),
    *(pytest.param({"engine": "fsdp2"}, by, marks=pytest.mark.slow) for by in ("wrapped", "in place")),
    ({"engine": "fsdp2"}, "part"),
]


@pytest.mark.parametrize(("config", "by"), WAYS)
def test_a_compiled_model_goes_through_other_world_sizes(
    crew: Crew, tmp_path: Path, config: dict[str, Any], by: str
) -> None:
    plain = through(crew, tmp_path / "plain", {**config, "by": "nothing"}, [((0, 1), None)])
    compiled = {**config, "by": by, "in_loop": True}
    moved = through(crew, tmp_path / "moved", compiled, [((0, 1, 2), 3), ((2, 0), 5), ((0, 1, 2), None)])
    assert _distance(plain.losses, moved.losses) <= ALLOWED
    assert _distance(plain.state, moved.state) <= ALLOWED
    survivor = moved.outcomes[5].told
    assert survivor["calls"] == 1
    assert len(set(survivor["graphs"].values())) == 1, "nothing is compiled again"


REHEARSED = [
    ({"stage": 1, "dropout": 0.1}, "wrapped"),
    pytest.param({"stage": 0}, "in place", marks=pytest.mark.slow),
    pytest.param({"stage": 2}, "part", marks=pytest.mark.slow),
    ({"stage": 3, "dropout": 0.1}, "in place"),
    ({"engine": "fsdp2", "dropout": 0.1}, "part"),
    pytest.param({"engine": "fsdp2", "fsdp2": {"param_dtype": "bfloat16"}}, "part", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "by"), REHEARSED)
def test_a_worker_that_joins_has_compiled_before(crew: Crew, tmp_path: Path, config: dict[str, Any], by: str) -> None:
    """It makes the passes of the others, as they have told them; the losses are those of a worker that has not."""
    ahead = {**config, "by": by, "in_loop": True, "ahead": True}
    parts: list[Run] = []
    for name, newcomer in (("cold", ahead), ("warm", {**ahead, "passes": True})):
        crew.replace(2)
        url = tmp_path / name
        begun = through(crew, url, ahead, [((0, 1), 3)])
        if "passes" in newcomer:
            newcomer["passes"] = begun.outcomes[0].told["model passes"]
        parts.append(through(crew, url, newcomer, [((0, 1, 2), None)]))
        told = parts[-1].outcomes[-1].told
        assert min(told["graphs"].values()) > 0
        if name == "warm":
            (said,) = [point for point in crew.members[2].points if "ahead of joining" in point]
            assert said.startswith("made ")
            assert told["ahead"] == max(told["graphs"].values()), "nothing is compiled in the generation"
        else:
            assert told["ahead"] == 0
    cold, warm = parts
    assert _distance(cold.losses, warm.losses) == 0.0
    assert _distance(cold.state, warm.state) == 0.0


@pytest.mark.parametrize(
    ("config", "by"), [({"stage": 1}, "wrapped"), ({"stage": 2}, "part"), ({"engine": "fsdp2"}, "part")]
)
def test_a_run_may_be_compiled_and_resumed_without(crew: Crew, tmp_path: Path, config: dict[str, Any], by: str) -> None:
    """The names in checkpoints are those of the plain model."""
    plain = through(crew, tmp_path / "plain", {**config, "by": "nothing"}, [((0, 1), None)])
    mixed = through(crew, tmp_path / "mixed", {**config, "by": by}, [((0, 1), 3)])
    mixed = through(crew, tmp_path / "mixed", {**config, "by": "nothing"}, [((1,), 5)])
    mixed = through(crew, tmp_path / "mixed", {**config, "by": by}, [((1, 0), None)])
    assert _distance(plain.state, mixed.state) <= ALLOWED


@pytest.mark.parametrize(("by", "what"), [("wrapped", "the model"), ("part", "module 'first'")])
def test_what_deepspeed_cannot_train_is_refused_by_name(crew: Crew, tmp_path: Path, by: str, what: str) -> None:
    (outcome,) = crew.run([0], "compiled.train", {"stage": 3, "by": by, "url": str(tmp_path)}, batch=BATCH)
    assert outcome.result.kind == "usage_error"
    assert f"DeepSpeed's stage 3 cannot train {what} as torch.compile has wrapped it" in outcome.result.message


@pytest.mark.parametrize("by", ["wrapped", "part", "in place", "engine"])
def test_a_compiled_model_is_not_run_uncompiled_to_count_its_flops(crew: Crew, tmp_path: Path, by: str) -> None:
    """Its data has no tokens, so that there is no estimate either."""
    (outcome,) = crew.run([0], "compiled.train", {"stage": 0, "by": by, "url": str(tmp_path)}, batch=BATCH)
    _assert_ended([outcome], "finished", LAST_STEP)
    assert {report.sample_flops for report in outcome.reports} == {0.0}
    assert min(outcome.told["graphs"].values()) > 0


EXPERTS: dict[str, Any] = {**DOUBLE, "dropout": 0.2}
SHARED: dict[str, Any] = {"ep": 2, "ep_sizes": (1, 2)}
ALL_EXPERTS: Sequence[Part] = (((0, 1, 2, 3), 3), ((2, 0), 5, {"ep": 1}), ((1, 3, 0, 2), None))
MESHES: dict[str, dict[str, int]] = {"alone": {}, "tp": {"tp": 2}, "sp": {"sp": 2}}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("by", "beside"),
    [
        ("blocks", "alone"),
        *(pytest.param(by, "alone", marks=SLOW) for by in ("attention", "wrapped blocks", "model", "wrapped", "rows")),
        *(pytest.param(by, "tp", marks=SLOW) for by in ("attention", "blocks", "wrapped")),
        *(pytest.param(by, "sp", marks=SLOW) for by in ("blocks", "wrapped")),
    ],
)
def test_experts_are_shared_within_what_is_compiled(crew: Crew, tmp_path: Path, by: str, beside: str) -> None:
    """Their graphs have nothing of the mesh in them; those of slices have, and are made once in each generation."""
    plain = {**DOUBLE, "sequences": True} if beside == "sp" else EXPERTS
    whole = through_experts(crew, tmp_path / "whole", plain, WHOLE)
    config = {**plain, "in_loop": True, "compiled": by}
    moved = through_experts(crew, tmp_path / "moved", config, ALL_EXPERTS, **SHARED, **MESHES[beside])
    assert_equal(whole, moved)
    # After each pass of the member that was in all three generations.
    first, second, last = moved.outcomes[-2].told["compiled"].values()
    assert min(first) > 0
    if by == "rows":
        assert max(len(set(first)), len(set(last))) <= 3, "a new number of rows, and then any"
    else:
        assert len(set(first)) == len(set(last)) == 1, "what the first pass has not compiled is not compiled again"
        assert (last[-1] == second[-1]) == (beside != "tp")


@pytest.mark.parametrize("beside", [pytest.param("tp", marks=SLOW), "alone"])
def test_survivors_with_compiled_blocks_stay_in_their_loop(crew: Crew, tmp_path: Path, beside: str) -> None:
    """They wait for experts of the dead one, or for one that does."""
    config, url = {**EXPERTS, "strict": True, "compiled": "blocks"}, tmp_path / "moved"
    run = with_a_rank_killed(crew, url, "routed.train", config, "backward", {"ep": 1}, **SHARED, **MESHES[beside])
    moved, whole = (
        Cells(url, run, MESHES[beside].get("tp", 1)),
        through_experts(crew, tmp_path / "whole", EXPERTS, WHOLE),
    )
    assert _distance(whole.after(AT), moved.losses) <= ALLOWED
    assert _distance(whole.state(), moved.state(whole.shapes[0])) <= EXACT


def through(crew: Crew, url: Path, config: dict[str, Any], parts: list[tuple[tuple[int, ...], int | None]]) -> Run:
    """Continues what is at `url`."""
    store, generations = CheckpointStore(str(url), "run"), []
    for who, end_at in parts:
        saved = store.list()
        outcomes = crew.run(
            who,
            "compiled.train",
            {**config, "url": str(url)},
            end_at=end_at,
            batch=BATCH,
            max_world_size=4,
            checkpoint=saved[0].id if saved else None,
            engine=str(config.get("engine", "deepspeed")),
        )
        _assert_ended(outcomes, "finished" if end_at is None else "ended", end_at or LAST_STEP)
        generations.append(outcomes)
    return Run(url, generations)
