"""Audits of masters and moments on real steps: flips in memory and wrong updates name the rank, and are not saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Outcome
from test_gradient_audit import ENGINES, _audits, _finished, _named, _run
from test_oracle import Run, _distance

from elastic.checkpoint.storage import CheckpointStore

pytestmark = pytest.mark.processes

STATE = ("master", "exp_avg", "exp_avg_sq")
SHARDED = [name for name in ENGINES if name != "stage1-fp16"]


def _flipped(crew: Crew, url: Path, name: str, every: int | None = 1, **how: Any) -> list[Outcome]:
    config = {**ENGINES[name], "victim": 1, "at": 3, "when": "within", **how}
    return _run(crew, url, config, fn="wrong_numbers.train_with_a_flip_at_rest", checkpoint_every_steps=every)


@pytest.mark.parametrize("kind", STATE)
@pytest.mark.parametrize("name", SHARDED)
def test_a_bit_that_flips_in_memory_names_rank_parameter_and_state(
    crew: Crew, tmp_path: Path, name: str, kind: str
) -> None:
    """In the step itself, audited or not: step 4 after three is, step 5 is not."""
    for at in (3, 4):
        outcomes = _flipped(crew, tmp_path / str(at), name, kind=kind, at=at)
        assert _named(outcomes, at) == (1,)
        bad = outcomes[0].result.bad_step
        assert f"rank 1: {kind} of " in bad.value, bad
        assert "has changed in memory between two updates" in bad.value
        assert bad.agreed_step == at // 2 * 2
        # The snapshot of the step before was read while it lay there.
        assert bad.sound_step == at - 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("stage1", "stage2", "stage3") for kind in STATE]
    + [(name, kind) for name in ("stage0", "fsdp2") for kind in STATE[1:]],
)
def test_a_bit_that_flips_while_the_script_is_between_two_steps_is_found_too(
    crew: Crew, tmp_path: Path, name: str, kind: str
) -> None:
    # Before a snapshot the copies of stage 0 are compared with each other, too.
    outcomes = _flipped(crew, tmp_path, name, None, kind=kind, when="between")
    assert _named(outcomes, 3) == (1,)
    assert f"rank 1: {kind} of " in outcomes[0].result.bad_step.value


@pytest.mark.parametrize("kind", STATE)
@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_whose_optimizer_computes_wrongly_is_outvoted(crew: Crew, tmp_path: Path, name: str, kind: str) -> None:
    config = {**ENGINES[name], "victim": 2, "at": 3, "kind": kind}
    outcomes = _run(crew, tmp_path, config, fn="wrong_numbers.train_with_wrong_updates", checkpoint_every_steps=1)
    assert _named(outcomes, 3) == (2,)
    bad = outcomes[0].result.bad_step
    assert f"most in {kind} of " in bad.value, bad
    assert bad.sound_step is None
    assert CheckpointStore(str(tmp_path), "run").list()[0].step == 3, "the wrong step was saved"


def test_two_ranks_name_one_whose_memory_has_changed(crew: Crew, tmp_path: Path) -> None:
    """In an update as between two: neither of them can compute again what is in memory then."""
    config = {"stage": 2, "victim": 1, "at": 3, "when": "within", "kind": "exp_avg"}
    for fn in ("wrong_numbers.train_with_a_flip_at_rest", "wrong_numbers.train_with_wrong_updates"):
        assert _named(_run(crew, tmp_path / fn, config, (0, 1), fn), 3) == (1,)


def test_a_script_that_writes_to_its_own_state_is_no_alarm(crew: Crew, tmp_path: Path) -> None:
    fn = "wrong_numbers.train_with_a_script_that_writes"
    for name in ("stage0", "stage2", "fsdp2"):
        audited = _run(crew, tmp_path / name, ENGINES[name], fn=fn)
        _finished(audited)
        # Where the masters are the weights, passes of one step cannot be repeated either.
        repeatable = {1: "measured", 2: "agreed", 4: "agreed", 6: "agreed", 8: "agreed"}
        assert _audits(audited[0]) == (repeatable if name == "stage2" else {1: "off until the next generation"})
        bare = _run(crew, tmp_path / f"{name}-bare", ENGINES[name], fn=fn, audit_every_steps=None)
        runs = [Run(tmp_path / name, [audited]), Run(tmp_path / f"{name}-bare", [bare])]
        assert _distance(runs[0].state, runs[1].state) == 0.0
