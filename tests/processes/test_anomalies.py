"""A step with a non-finite loss or gradient, on real DeepSpeed: every rank finds it, nobody saves it or applies it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Outcome

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.data.micro_batches import step_positions
from elastic.core.data.samples import SampleOrder
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

SIZE = 57
BATCH = BatchSettings(epochs=1)
ORDER = SampleOrder(SIZE, 0)
# In the third step, the micro-batch of the last rank of any world size up to three.
BAD = ORDER.at(28)[1]
SKIP = ((20, 30),)


def _config(url: Path, stage: int, how: str = "nan", **more: Any) -> dict[str, Any]:
    return {"stage": stage, "url": str(url), "size": SIZE, "bad": BAD, "how": how, "dropout": 0.1, **more}


def _spec(policy: str = "rollback", **more: Any) -> dict[str, Any]:
    return {"batch": BATCH, "anomalies": AnomalySettings(policy), "checkpoint_every_steps": 1, **more}  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_finds_it_and_the_run_goes_on_without_the_samples(
    crew: Crew, tmp_path: Path, stage: int, dtype: str
) -> None:
    config = _config(tmp_path, stage, dtype=dtype)
    found = crew.run([0, 1, 2], "train_on_a_bad_sample", config, **_spec())
    assert [(o.result.kind, o.result.step, o.clean) for o in found] == [("anomaly", 2, True)] * 3, found[0].result
    assert {o.result.bad_step.positions for o in found} == {SKIP}
    assert [o.result.bad_step.kind for o in found] == ["gradient", "gradient", "loss"]
    assert all(len(o.reports) == 2 for o in found), "the step was reported although it does not count"

    store = CheckpointStore(str(tmp_path), "run")
    newest = store.list()[0]
    assert newest.step == 2, "the bad step was saved"
    went_on = crew.run([0, 1], "train_on_a_bad_sample", config, **_spec(checkpoint=newest.id, skips=SKIP))
    _finished(went_on)
    # 57 samples less ten: two steps before, two after, and a short one.
    assert [report.step for report in went_on[0].reports] == [3, 4, 5]
    given = sorted(index for o in (*found, *went_on) for index in o.indices)
    assert given == sorted(range(SIZE)), "the bad batch was read once, by the generation that found it"
    assert BAD not in [index for o in went_on for index in o.indices]
    taken = [r for o in went_on for report in o.reports for r in report.positions]
    assert sorted(taken)[0][0] == step_positions(2, 10, 47, SKIP)[0] == 30
    assert max(stop for _, stop in taken) == SIZE

    calm = _config(tmp_path / "undisturbed", stage, dtype=dtype)
    undisturbed = crew.run([0, 1], "train_on_a_bad_sample", calm, **_spec(skips=SKIP))
    _finished(undisturbed)
    rtol = 1e-5 if dtype == "fp32" else 0.05
    assert _losses(went_on) == pytest.approx(_losses(undisturbed)[2:], rel=rtol)


@pytest.mark.parametrize("how", ["inf", "constant", "gradient"])
@pytest.mark.parametrize("stage", [0, 2])
def test_whatever_is_no_number(crew: Crew, tmp_path: Path, stage: int, how: str) -> None:
    found = crew.run([0, 1], "train_on_a_bad_sample", _config(tmp_path, stage, how), **_spec())
    assert [(o.result.kind, o.result.step) for o in found] == [("anomaly", 2)] * 2, found[0].result
    last = found[1].result.bad_step
    assert (last.kind, last.value) == {"gradient": ("gradient", "not finite")}.get(how, ("loss", "inf"))


def test_ranks_tell_each_other_where_deepspeed_computes_no_norm(crew: Crew, tmp_path: Path) -> None:
    config = _config(tmp_path, 2, clipping=0.0, zero={"compute_grad_norm": False})
    found = crew.run([0, 1], "train_on_a_bad_sample", config, **_spec())
    assert [(o.result.kind, o.result.step) for o in found] == [("anomaly", 2)] * 2, found[0].result


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_bad_loss_in_fp16_is_told_from_an_overflow(crew: Crew, tmp_path: Path, stage: int) -> None:
    """DeepSpeed takes both for an overflow, skips the step and halves the scale."""
    found = crew.run([0, 1], "train_on_a_bad_sample", _config(tmp_path, stage, dtype="fp16"), **_spec())
    assert [(o.result.kind, o.result.step) for o in found] == [("anomaly", 2)] * 2, found[0].result
    assert [str(o.result.bad_step) for o in found] == ["the loss is not finite on another rank", "the loss is nan"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_leaves_the_weights_as_they_were(crew: Crew, tmp_path: Path, stage: int) -> None:
    """The step is the last one, so that the weights are those of a run that ends before it."""
    config = _config(tmp_path, stage)
    three = BatchSettings(max_steps=3)
    skipped = crew.run([0, 1], "train_on_a_bad_sample", config, **_spec("skip", batch=three))
    _finished(skipped)
    shorter = crew.run(
        [0, 1], "train_on_a_bad_sample", _config(tmp_path / "two", stage), **_spec(batch=BatchSettings(max_steps=2))
    )
    if stage < 3:
        for mine, theirs in zip(skipped, shorter, strict=True):
            for name, value in mine.told["weights"].items():
                torch.testing.assert_close(value, theirs.told["weights"][name], rtol=0, atol=0)
    assert _state_of(tmp_path, 3) == _state_of(tmp_path / "two", 2)
    told = skipped[0].told
    # As with DeepSpeed's own: the step is counted, the schedule stands still.
    assert (told["global_steps"], told["skipped_steps"], told["lr"]) == (3, 1, shorter[0].told["lr"])
    last = [o.reports[-1] for o in skipped]
    assert [(r.step, r.positions) for r in last] == [(3, ())] * 2
    assert sorted(r for report in last for r in report.skipped) == [(20, 24), (24, 30)]
    assert [r.anomaly for r in last] == ["the gradient is not finite", "the loss is nan"]


def test_skipping_goes_on_with_the_next_step(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run([0, 1], "train_on_a_bad_sample", _config(tmp_path, 2), **_spec("skip"))
    _finished(outcomes)
    assert [report.step for report in outcomes[0].reports] == [1, 2, 3, 4, 5, 6]
    assert [bool(report.skipped) for report in outcomes[0].reports] == [False, False, True, False, False, False]
    assert all(math.isfinite(loss) for step, loss in enumerate(_losses(outcomes), 1) if step != 3)


def test_a_configuration_that_cannot_skip_is_refused_at_once(crew: Crew, tmp_path: Path) -> None:
    config = _config(tmp_path, 2, dtype="bf16", bf16={"check_grad_overflow": False})
    for outcome in crew.run([0, 1], "train_on_a_bad_sample", config, **_spec("skip")):
        assert outcome.result.kind == "usage_error"
        assert "without bf16.check_grad_overflow a bad gradient is known only after the step" in outcome.result.message


def test_weights_that_were_spoilt_are_left_behind(crew: Crew, tmp_path: Path) -> None:
    """Where DeepSpeed does not look before it applies a step, going back is what helps."""
    config = _config(tmp_path, 2, dtype="bf16", bf16={"check_grad_overflow": False})
    found = crew.run([0, 1], "train_on_a_bad_sample", config, **_spec())
    assert [(o.result.kind, o.result.step) for o in found] == [("anomaly", 2)] * 2, found[0].result
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
    went_on = crew.run([0, 1], "train_on_a_bad_sample", config, **_spec(checkpoint=checkpoint, skips=SKIP))
    _finished(went_on)
    assert all(map(math.isfinite, _losses(went_on)))


def test_a_state_that_was_trained_on_left_out_samples_is_refused(crew: Crew, tmp_path: Path) -> None:
    config = _config(tmp_path, 1) | {"bad": -1}
    crew.run([0, 1], "train_on_a_bad_sample", config, **_spec(batch=BatchSettings(max_steps=3)))
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0]
    assert checkpoint.step == 3
    for outcome in crew.run([0, 1], "train_on_a_bad_sample", config, **_spec(checkpoint=checkpoint.id, skips=SKIP)):
        assert (outcome.result.kind, outcome.result.checkpoint) == ("restore_failed", checkpoint.id)
        assert "was trained on samples 20 to 29, which were found to be no good" in outcome.result.message


def test_what_the_state_left_out_stays_left_out(crew: Crew, tmp_path: Path) -> None:
    """A controller without the journal of the attempt before does not know of it; the state does."""
    config = _config(tmp_path, 1)
    crew.run([0, 1], "train_on_a_bad_sample", config, end_at=4, **_spec(skips=SKIP))
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0]
    rest = crew.run([0, 1, 2], "train_on_a_bad_sample", config, **_spec(checkpoint=checkpoint.id))
    _finished(rest)
    assert sorted(r for o in rest for report in o.reports for r in report.positions)[0][0] == 50
    assert [report.step for report in rest[0].reports] == [5]


def _finished(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert (outcome.result.kind, outcome.result.completed) == ("finished", True), outcome.result.traceback


def _losses(outcomes: list[Outcome]) -> list[float]:
    return [sum(report.loss for report in reports) for reports in zip(*(o.reports for o in outcomes), strict=True)]


def _state_of(url: Path, step: int) -> dict[str, Any]:
    """The contents of a checkpoint's tensors, whichever way they are cut."""
    store = CheckpointStore(str(url), "run")
    ref = next(ref for ref in store.list() if ref.step == step)
    return dict(store.manifest(ref.id).digests)
