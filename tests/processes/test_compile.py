"""Compiled models through other world sizes; the oracle is the same model, not compiled, undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew
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
    if "stage" in config:
        assert len(set(survivor["graphs"].values())) == 1, "nothing is compiled again"


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
