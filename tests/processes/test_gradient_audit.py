"""Audits of real steps: whoever computes wrong numbers is named in the same step, and healthy training is unchanged."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Outcome
from test_oracle import FLOOR, Run, _distance

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings
from elastic.core.settings import AnomalySettings

pytestmark = pytest.mark.processes

# In steps of ten samples: the last of two epochs of 37 has four.
EPOCHS = BatchSettings(epochs=2)
# Of rank 1's three passes in step 4: the number of the one that no other rank repeats.
UNAUDITED = 1
ENGINES: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage2-bf16": {"stage": 2, "dtype": "bf16"},
    "stage1-fp16": {"stage": 1, "dtype": "fp16"},
    "fsdp2": {"engine": "fsdp2"},
    "fsdp2-layers": {"engine": "fsdp2", "fsdp2": {"shard": ["Linear"], "cpu_offload": True}},
}


def _run(
    crew: Crew, url: Path, config: dict[str, Any], who: Sequence[int] = (0, 1, 2), fn: str = "train", **more: Any
) -> list[Outcome]:
    spec: dict[str, Any] = {
        "batch": EPOCHS,
        "audit_every_steps": 2,
        "anomalies": AnomalySettings(),
        "max_world_size": 4,
    } | more
    engine = config.get("engine", "deepspeed")
    return crew.run(who, fn, {**config, "url": str(url)}, engine=engine, **spec)


def _audits(outcome: Outcome) -> dict[int, str]:
    return {report.step: report.audit.partition(":")[0] for report in outcome.reports if report.audit}


def _finished(outcomes: list[Outcome]) -> None:
    assert {(outcome.result.kind, outcome.clean) for outcome in outcomes} == {("finished", True)}, outcomes[0].result


def _named(outcomes: list[Outcome], step: int) -> tuple[int, ...]:
    """The ranks that all ranks name, in the step after `step` finished ones."""
    results = [outcome.result for outcome in outcomes]
    assert {(result.kind, result.step) for result in results} == {("anomaly", step)}, results
    assert all(outcome.clean for outcome in outcomes), "an engine outlived its generation"
    (bad,) = {result.bad_step for result in results}
    assert (bad.kind, bad.decided) == ("audit", True), bad
    return tuple(bad.suspects)


@pytest.mark.parametrize("name", ENGINES)
def test_training_is_the_same_bit_for_bit(crew: Crew, tmp_path: Path, name: str) -> None:
    runs = []
    for every in (None, 2):
        config = {**ENGINES[name], "dropout": 0.1}
        outcomes = _run(crew, tmp_path / str(every), config, audit_every_steps=every)
        _finished(outcomes)
        runs.append(Run(tmp_path / str(every), [outcomes]))
        audits = {1: "measured", 2: "agreed", 4: "agreed", 6: "agreed", 8: "agreed"}
        assert [_audits(outcome) for outcome in outcomes] == [audits if every else {}] * 3
    assert _distance(runs[0].state, runs[1].state) == 0.0
    assert runs[0].losses == runs[1].losses


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "stage1-fp16"])
def test_a_rank_that_computes_wrong_gradients_is_named(crew: Crew, tmp_path: Path, name: str) -> None:
    """In the step itself, which is not applied; whichever rank it is."""
    for victim in range(3):
        url = tmp_path / str(victim)
        config = {**ENGINES[name], "victim": victim, "at": 2}
        outcomes = _run(crew, url, config, fn="wrong_numbers.train_with_a_flip", checkpoint_every_steps=1)
        assert _named(outcomes, 3) == (victim,)
        assert outcomes[0].result.bad_step.agreed_step == 2
        assert CheckpointStore(str(url), "run").list()[0].step == 3, "the wrong step was saved"


@pytest.mark.parametrize("once", [0, 1, 2])
def test_a_single_wrong_pass_is_named(crew: Crew, tmp_path: Path, once: int) -> None:
    """Of the passes of an audited step: one of rank 1's own two, or its repetition of another rank's. The one that is
    not audited goes unnoticed; the next audit of the same rank takes the other."""
    config = {"stage": 2, "victim": 1, "at": 3, "once": once}
    outcomes = _run(crew, tmp_path, config, fn="wrong_numbers.train_with_a_flip")
    if once == UNAUDITED:
        _finished(outcomes)
    else:
        assert _named(outcomes, 3) == (1,)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_that_changes_in_memory_is_found_by_its_gradients(crew: Crew, tmp_path: Path, stage: int) -> None:
    """In stage 0, where every rank keeps its own weights, at the next audit; in the others the copy lives up to the
    next step only."""
    config = {"stage": stage, "victim": 2, "at": 3}
    outcomes = _run(crew, tmp_path, config, fn="wrong_numbers.train_on_a_flipped_weight")
    assert _named(outcomes, 3) == (2,)


def test_two_ranks_cannot_outvote_each_other_but_a_single_wrong_pass_is_named(crew: Crew, tmp_path: Path) -> None:
    """The step is undone all the same."""
    fn = "wrong_numbers.train_with_a_flip"
    always = {"stage": 1, "victim": 1, "at": 2}
    results = [outcome.result for outcome in _run(crew, tmp_path / "always", always, (0, 1), fn)]
    assert {(result.kind, result.step) for result in results} == {("anomaly", 3)}, results
    assert {(result.bad_step.suspects, result.bad_step.decided) for result in results} == {((0, 1), False)}
    assert "no majority" in results[0].bad_step.value
    once = _run(crew, tmp_path / "once", {**always, "at": 3, "once": 2}, (0, 1), fn)
    assert _named(once, 3) == (1,)


@pytest.mark.parametrize("how", ["rank", "counter", "generator", "buffers"])
def test_a_loss_that_no_other_rank_can_repeat_is_no_alarm(crew: Crew, tmp_path: Path, how: str) -> None:
    """Nor does any of the passes enter the steps, although they are not compared any more."""
    config, fn = {"stage": 1, "how": how}, "wrong_numbers.train_with_a_loss_of_its_own"
    outcomes = _run(crew, tmp_path / "audited", config, fn=fn)
    _finished(outcomes)
    off = "off until the next generation"
    # A factor that is the rank's own is the same in its repetition.
    audits = {1: "measured", 2: off} if how == "rank" else {1: off}
    assert [_audits(outcome) for outcome in outcomes] == [audits] * 3
    if how in ("rank", "buffers"):
        # The others count passes by themselves.
        without = _run(crew, tmp_path / "without", config, fn=fn, audit_every_steps=None)
        runs = [Run(tmp_path / "audited", [outcomes]), Run(tmp_path / "without", [without])]
        assert _distance(runs[0].state, runs[1].state) == 0.0
        assert runs[0].losses == runs[1].losses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_kill_within_an_audits_pass_changes_nothing(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = {"stage": stage, "dropout": 0.1}
    undisturbed = _run(crew, tmp_path / "still", config, audit_every_steps=None)
    store = CheckpointStore(str(tmp_path / "cut"), "run")
    crew.begin(
        (0, 1, 2), "wrong_numbers.train_and_stay_in_an_audit",
        {**config, "url": str(tmp_path / "cut"), "victim": 1, "at": 3},
        batch=EPOCHS, audit_every_steps=2, max_world_size=4, checkpoint_every_steps=1,
    )  # fmt: skip
    crew.reached(1, "in an audit")
    crew.reached(0, "committed step 2")
    crew.members[1].signal(signal.SIGKILL)
    assert {crew.outcome(number).result.kind for number in (0, 2)} == {"collective_failed"}
    crew.replace(1)
    newest = store.list()[0]
    assert newest.step in (2, 3)
    again = _run(crew, tmp_path / "cut", config, (2, 0, 1), checkpoint=newest.id)
    _finished(again)
    assert set(_audits(again[0])) == {newest.step + 1, 4, 6, 8}
    runs = [Run(tmp_path / "still", [undisturbed]), Run(tmp_path / "cut", [again])]
    assert _distance(runs[0].state, runs[1].state) <= FLOOR
    later = {name: loss for name, loss in runs[0].losses.items() if name in runs[1].losses}
    assert len(later) == 8 - newest.step
    assert _distance(later, runs[1].losses) <= FLOOR


def test_one_rank_is_not_audited_and_a_smaller_world_goes_on(crew: Crew, tmp_path: Path) -> None:
    three = _run(crew, tmp_path, {"stage": 1, "dropout": 0.1}, end_at=3)
    assert [_audits(outcome) for outcome in three] == [{1: "measured", 2: "agreed"}] * 3
    newest = CheckpointStore(str(tmp_path), "run").list()[0].id
    two = _run(crew, tmp_path, {"stage": 1, "dropout": 0.1}, (0, 1), end_at=6, checkpoint=newest)
    assert [_audits(outcome) for outcome in two] == [{4: "agreed", 6: "agreed"}] * 2
    newest = CheckpointStore(str(tmp_path), "run").list()[0].id
    (one,) = _run(crew, tmp_path, {"stage": 1, "dropout": 0.1}, (0,), checkpoint=newest)
    assert (one.result.kind, _audits(one)) == ("finished", {})


def test_what_cannot_be_audited_is_refused(crew: Crew, tmp_path: Path) -> None:
    (outcome,) = _run(crew, tmp_path, {"stage": 1}, (0,), "wrong_numbers.train_on_a_stream")
    assert outcome.result.kind == "usage_error", outcome.result
    assert "use a map-style dataset, or leave audit out" in outcome.result.message
