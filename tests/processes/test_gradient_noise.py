"""The gradient noise of real steps: what is read of them is right, in every engine, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from crew import Crew, Outcome
from noisy import FAR, SPREADS
from test_oracle import Run, _distance

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.step_table import StepTable
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings
from elastic.observe import records
from elastic.observe.laws.gradient_noise import Estimate, estimate, noise_scale
from elastic.observe.steps import final_steps

pytestmark = pytest.mark.processes

# In steps of ten samples: the last of two epochs of 37 has four.
EPOCHS = BatchSettings(epochs=2)
ENGINES: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage2-bf16": {"stage": 2, "dtype": "bf16"},
    "stage1-fp16": {"stage": 1, "dtype": "fp16"},
    "stage3-fp16": {"stage": 3, "dtype": "fp16"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-layers": {"engine": "fsdp2", "fsdp2": {"shard": ["Linear"], "cpu_offload": True}},
    "fsdp2-bf16": {"engine": "fsdp2", "fsdp2": {"param_dtype": "bfloat16"}},
}
# Of squared norms: gradients of half precision, and their sums over ranks, are rounded to it.
_TOLERANCE = {"bf16": 3e-2, "fp16": 5e-3}


def _run(
    crew: Crew, url: Path, config: dict[str, Any], who: Sequence[int] = (0, 1), fn: str = "noisy.train_on_one_sample",
    **more: Any,
) -> list[Outcome]:  # fmt: skip
    spec: dict[str, Any] = {
        "batch": BatchSettings(max_steps=3),
        "noise_every_steps": 1,
        "anomalies": AnomalySettings(),
    } | more
    engine = config.get("engine", "deepspeed")
    spec["max_world_size"] = 4
    outcomes = crew.run(who, fn, {**config, "url": str(url)}, engine=engine, **spec)
    assert {outcome.result.kind for outcome in outcomes} <= {"finished", "ended"}, outcomes[0].result.traceback
    return outcomes


def _cut_by(micro_batch: int, config: dict[str, Any]) -> dict[str, Any]:
    """Of ten samples, in fours: two micro-batches of four, and one of two."""
    top = {"train_micro_batch_size_per_gpu": micro_batch}
    return {**config, "top": top, "fsdp2": {**config.get("fsdp2", {}), "micro_batch": micro_batch}}


def _journal(*generations: list[Outcome]) -> list[records.Record]:
    written: list[records.Record] = []
    for number, outcomes in enumerate(generations, start=1):
        reports = [
            replace(report, generation=number, rank=rank)
            for rank, outcome in enumerate(outcomes)
            for report in outcome.reports
        ]
        first = min(report.step for report in reports)
        written.append(records.generation_began(number, len(outcomes), first, 0.0, (), {}))
        table = StepTable()
        table.begin(number, len(outcomes), first - 1)
        done = [found for report in reports if (found := table.add(report)) is not None]
        written.append(records.steps([records.step(step, 0.0) for step in done]))
    return written


def _estimates(*generations: list[Outcome]) -> list[Estimate]:
    return [found for step in final_steps(_journal(*generations)) if (found := estimate(step)) is not None]


@pytest.mark.parametrize("name", ENGINES)
def test_equal_samples_have_no_noise(crew: Crew, tmp_path: Path, name: str) -> None:
    """The norms that hooks read are, scale by scale, the norm that the engine reports of the mean gradient."""
    outcomes = _run(crew, tmp_path, ENGINES[name])
    tolerance = _TOLERANCE.get(name.partition("-")[2], 1e-5)
    steps = final_steps(_journal(outcomes))
    assert len(steps) == 3
    for step in steps:
        if ENGINES[name].get("dtype") == "fp16" and not step.get("gradient_parts"):
            continue
        count, mean = step["gradient_parts"]
        assert count == 5
        assert mean == pytest.approx(step["grad_norm"] ** 2, rel=tolerance)
        assert mean > 0.01
    assert steps[-1]["gradient_parts"]


@pytest.mark.parametrize("name", ENGINES)
def test_training_is_the_same_bit_for_bit(crew: Crew, tmp_path: Path, name: str) -> None:
    runs = []
    for every in (None, 2):
        config = {**_cut_by(4, ENGINES[name]), "dropout": 0.1}
        outcomes = _run(crew, tmp_path / str(every), config, fn="train", batch=EPOCHS, noise_every_steps=every)
        runs.append(Run(tmp_path / str(every), [outcomes]))
        measured = {report.step for outcome in outcomes for report in outcome.reports if report.gradient_parts}
        assert measured <= ({2, 4, 6, 8} if every else set())
        assert not every or 8 in measured
    assert _distance(runs[0].state, runs[1].state) == 0.0
    assert runs[0].losses == runs[1].losses


@pytest.mark.parametrize("config", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"engine": "fsdp2"}], ids=str)
def test_the_estimates_are_those_of_any_world_size(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    found = [
        _estimates(_run(crew, tmp_path / str(size), _cut_by(4, config), range(size), "train", batch=EPOCHS))
        for size in (1, 2, 4)
    ]
    # The last step is one micro-batch.
    assert [len(estimates) for estimates in found] == [7, 7, 7]
    for other in found[1:]:
        _same(found[0], other)


def test_the_averages_go_on_through_other_world_sizes(crew: Crew, tmp_path: Path) -> None:
    still = _run(crew, tmp_path / "still", {"stage": 1}, (0, 1), "train", batch=EPOCHS)
    url = tmp_path / "moved"
    moved, checkpoint = [], None
    for who, end_at in (((0, 1), 3), ((1, 2, 0), 5), ((3,), None)):
        moved.append(_run(crew, url, {"stage": 1}, who, "train", batch=EPOCHS, end_at=end_at, checkpoint=checkpoint))
        checkpoint = CheckpointStore(str(url), "run").list()[0].id
    _same(_estimates(still), _estimates(*moved))
    before, after = noise_scale(_journal(still)), noise_scale(_journal(*moved))
    assert before is not None
    assert after is not None
    assert (after.measured, after.step) == (before.measured, before.step) == (8, 8)
    assert (after.noise, after.gradient) == pytest.approx((before.noise, before.gradient), rel=1e-4)


@pytest.mark.parametrize("config", [{"stage": 1}, {"engine": "fsdp2"}], ids=str)
def test_known_noise_is_found(crew: Crew, tmp_path: Path, config: dict[str, Any]) -> None:
    steps = 60
    fn = "noisy.train_where_noise_is_known"
    config = {**_cut_by(4, config), "size": 10 * steps, "schedule": False, "clipping": 0.0}
    outcomes = _run(crew, tmp_path, config, fn=fn, batch=BatchSettings(max_steps=steps))
    found = _estimates(outcomes)
    assert len(found) == steps
    noise, gradient = sum(spread * spread for spread in SPREADS), len(SPREADS) * FAR * FAR
    for values, truth in (([one.noise for one in found], noise), ([one.gradient for one in found], gradient)):
        assert abs(fmean(values) - truth) < 4 * stdev(values) / math.sqrt(steps)
        assert stdev(values) / math.sqrt(steps) < truth / 2, "the samples say something"


def test_what_cannot_be_measured_is_refused(crew: Crew, tmp_path: Path) -> None:
    def said(fn: str, micro_batch: int = 2) -> str:
        config = {**_cut_by(micro_batch, {"stage": 0}), "url": str(tmp_path)}
        (outcome,) = crew.run([0], fn, config, batch=BatchSettings(max_steps=2), noise_every_steps=1)
        assert outcome.result.kind == "usage_error", outcome.result
        return str(outcome.result.message)

    assert "micro_batch (10) must be below global_batch (10)" in said("train", 10)
    assert "came in 2 parts" in said("noisy.train_reentrant")
    assert "let anomalies.policy be other than off" in said("train")


def _same(one: Sequence[Estimate], other: Sequence[Estimate]) -> None:
    """But for the order of additions: both are differences of numbers that are rounded."""
    assert [(each.step, each.samples) for each in one] == [(each.step, each.samples) for each in other]
    for here, there in zip(one, other, strict=True):
        assert here.noise == pytest.approx(there.noise, rel=1e-4, abs=1e-5)
        assert here.gradient == pytest.approx(there.gradient, rel=1e-4, abs=1e-5)
