"""A batch that follows the number of workers, and the learning rate with it, against plain torch."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from adaptive_ranks import FULL, MICRO, MOST, expected
from crew import Crew, Outcome

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.adaptive_batch import POWERS, AdaptiveBatch
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

PARTS = [(3, 3), (1, 5), (4, 12)]
SLOW = pytest.mark.slow


def _batch(
    rate: str, warmup: int = 0, max_steps: int | None = PARTS[-1][1], epochs: int | None = None
) -> BatchSettings:
    return BatchSettings(max_steps=max_steps, epochs=epochs, adaptive=AdaptiveBatch(rate, warmup))


def _common(config: dict[str, Any], batch: BatchSettings, **more: Any) -> dict[str, Any]:
    engine = {"engine": "fsdp2"} if config.get("engine") == "fsdp2" else {}
    return {"batch": batch, "max_world_size": MOST, "anomalies": AnomalySettings("skip"), **engine, **more}


def _run(crew: Crew, url: Path, ranks: int, config: dict[str, Any], batch: BatchSettings, **more: Any) -> list[Outcome]:
    told = {**config, "url": str(url)}
    outcomes = crew.run(range(ranks), "adaptive_ranks.train", told, **_common(config, batch, **more))
    kind = "ended" if "end_at" in more else "finished"
    assert {outcome.result.kind for outcome in outcomes} == {kind}, outcomes[0].result.traceback
    assert all(outcome.clean and not outcome.sockets for outcome in outcomes)
    return outcomes


def _newest(url: Path) -> str:
    return CheckpointStore(str(url), "run").list()[0].id


def _steps(outcomes: list[Outcome]) -> list[tuple[float, float, tuple[int, int]]]:
    """Loss, rate and positions of each step, over all ranks."""
    found = []
    for reports in zip(*(outcome.reports for outcome in outcomes), strict=True):
        ranges = sorted(range_ for report in reports for range_ in report.positions)
        assert all(before[1] == after[0] for before, after in pairwise(ranges)), ranges
        (rate,) = {report.learning_rates for report in reports}
        found.append((sum(report.loss for report in reports), rate[0], (ranges[0][0], ranges[-1][1])))
    return found


@pytest.mark.parametrize(
    ("config", "rate", "warmup"),
    [
        ({"stage": 1, "optimizer": "sgd"}, "linear", 3),
        ({"stage": 2, "optimizer": "adamw"}, "sqrt", 0),
        pytest.param({"stage": 0, "optimizer": "adamw"}, "sqrt", 2, marks=SLOW),
        pytest.param({"stage": 0, "optimizer": "sgd"}, "constant", 2, marks=SLOW),
        ({"stage": 3, "optimizer": "adamw", "in_loop": False}, "linear", 0),
        ({"engine": "fsdp2", "optimizer": "sgd"}, "linear", 3),
    ],
    ids=str,
)
def test_it_is_plain_torch_with_these_batches_and_rates(
    crew: Crew, tmp_path: Path, config: dict[str, Any], rate: str, warmup: int
) -> None:
    """3, 1 and 4 workers: every sample once, whatever the batch."""
    checkpoint, found = None, []
    for ranks, until in PARTS:
        ends = {} if until == PARTS[-1][1] else {"end_at": until}
        told = _run(crew, tmp_path, ranks, config, _batch(rate, warmup), checkpoint=checkpoint, **ends)
        found += _steps(told)
        checkpoint = _newest(tmp_path)
    losses, rates, positions = expected(PARTS, POWERS[rate], warmup, config["optimizer"])
    assert [step[2] for step in found] == positions
    assert [step[1] for step in found] == pytest.approx(rates, rel=1e-6)
    assert [step[0] for step in found] == pytest.approx(losses, rel=2e-5)


def test_a_killed_worker_makes_the_batch_smaller(crew: Crew, tmp_path: Path) -> None:
    """The steps since the checkpoint are done again, with other samples each and every sample once."""
    config, batch = {"stage": 1, "optimizer": "sgd", "in_loop": True}, _batch("linear", 0, 8)
    crew.begin(
        range(3), "adaptive_ranks.train", {**config, "url": str(tmp_path), "stays": (2, 6)},
        **_common(config, batch, checkpoint_every_steps=4),
    )  # fmt: skip
    crew.reached(2, "stays")
    crew.reached(0, "committed step 4")
    crew.members[2].signal(signal.SIGKILL)
    before = _steps([crew.outcome(number) for number in (0, 1)])
    assert len(before) == 6
    told = _run(crew, tmp_path, 2, config, batch, checkpoint=_newest(tmp_path))
    losses, _, positions = expected([(3, 4), (2, 8)], 1.0, 0, "sgd")
    assert [step[2] for step in _steps(told)] == positions[4:]
    assert [step[0] for step in _steps(told)] == pytest.approx(losses[4:], rel=2e-5)
    # Steps 5 and 6 are repeated with other rates, which is not the script's doing.
    assert all("warned" not in outcome.told for outcome in told)


def test_an_epoch_has_more_steps_where_they_are_smaller(crew: Crew, tmp_path: Path) -> None:
    """960 samples: 5 steps of 48, then steps of 24; the last is whole."""
    config, batch = {"stage": 1, "optimizer": "sgd"}, _batch("linear", 0, None, epochs=1)
    _run(crew, tmp_path, 4, config, batch, end_at=5)
    told = _run(crew, tmp_path, 2, config, batch, checkpoint=_newest(tmp_path))
    found = _steps(told)
    assert len(found) == (960 - 5 * 48) // 24
    assert found[-1][2] == (936, 960)


def _refused(crew: Crew, url: Path, config: dict[str, Any], batch: BatchSettings, **more: Any) -> str:
    told = {"stage": 1, "optimizer": "sgd", **config, "url": str(url)}
    common = {**_common(config, batch), **more}
    (outcome, _) = crew.run(range(2), "adaptive_ranks.train", told, **common)
    assert outcome.result.kind == "usage_error", outcome.result
    return str(outcome.result.message)


def test_what_does_not_go_with_it_is_refused(crew: Crew, tmp_path: Path) -> None:
    batch = _batch("linear")
    told = _refused(crew, tmp_path, {}, batch, anomalies=AnomalySettings("rollback"))
    assert "batch.adaptive does not go with anomalies.policy: rollback" in told
    told = _refused(crew, tmp_path, {}, batch, max_world_size=3)
    assert f"({FULL}) must be a multiple of micro_batch ({MICRO}) times the most data-parallel workers (3)" in told
    _run(crew, tmp_path, 2, {"stage": 1, "optimizer": "sgd"}, batch, end_at=3)
    fixed = BatchSettings(max_steps=8)
    told = _refused(crew, tmp_path, {}, fixed, checkpoint=_newest(tmp_path))
    assert "batch in proportion to the workers, this run has the same in all steps" in told
