"""A generation that is ended from outside, and the next one in the same processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew, Outcome

from elastic.checkpoint.storage import CheckpointStore
from elastic.core.generation_spec import BatchSettings

pytestmark = pytest.mark.processes

BATCH = BatchSettings(max_steps=6)


def _config(stage: int, url: Path, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "dropout": 0.1, "url": str(url), **more}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_survivors_of_a_killed_rank_go_on_in_the_same_processes(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = _config(stage, tmp_path, victim=1, at=3)
    pids = [member.process.pid for member in crew.members]
    crew.begin([0, 1, 2], "misbehaving.train_until_fault", config, batch=BATCH, checkpoint_every_steps=2)
    for number in (0, 1, 2):
        crew.reached(number, "there")
    crew.reached(0, "committed step 2")
    ended = crew.lose(1, [0, 2])
    assert all(outcome.result.step == 3 and outcome.clean for outcome in ended), ended

    store = CheckpointStore(str(tmp_path), "run")
    newest = store.list()[0]
    assert newest.step == 2
    again = crew.run([0, 2], "train", config, batch=BATCH, checkpoint=newest.id)
    assert [(outcome.result.kind, outcome.result.completed) for outcome in again] == [("finished", True)] * 2
    assert [report.step for report in again[0].reports] == [3, 4, 5, 6]
    assert [crew.members[number].process.pid for number in (0, 2)] == [pids[0], pids[2]]
    crew.replace(1)


@pytest.mark.parametrize("stage", [2, 3])
def test_abort_releases_ranks_that_a_frozen_peer_blocks(crew: Crew, tmp_path: Path, stage: int) -> None:
    config = _config(stage, tmp_path, victim=0, at=2)
    crew.begin([0, 1, 2], "misbehaving.train_until_fault", config, batch=BATCH)
    for number in (0, 1, 2):
        crew.reached(number, "there")
    crew.members[0].signal(signal.SIGSTOP)
    try:
        for number in (1, 2):
            crew.in_collective(number)
        for number in (1, 2):
            crew.abort(number, "rank 0 is frozen")
        ended = [crew.outcome(number) for number in (1, 2)]
        assert [(outcome.result.kind, outcome.result.message) for outcome in ended] == [
            ("ended", "rank 0 is frozen")
        ] * 2
        again = crew.run([2, 1], "train", config, batch=BATCH)
        assert [outcome.result.kind for outcome in again] == ["finished"] * 2
    finally:
        crew.members[0].signal(signal.SIGCONT)
        crew.replace(0)


def test_abort_releases_ranks_in_the_middle_of_exchanges(crew: Crew, tmp_path: Path) -> None:
    """gloo forgets whom it would answer on a connection that cannot be written to any more (elastic/comm/sockets.py):
    two rounds in five once ended with the timeout of the groups."""
    config = _config(2, tmp_path, by="all-to-all", numbers=8)
    for _ in range(15):
        crew.begin([0, 1], "exchanges.for_ever", config, batch=BATCH)
        for number in (0, 1):
            crew.reached(number, "there")
        for number in (0, 1):
            crew.abort(number, "rank 2 was lost")
        for number in (0, 1):
            assert crew.outcome(number).result.kind in ("ended", "collective_failed")
            # Rarely a peer's end comes so that only the wait can be left, and gloo keeps its group for a while.
            assert all(held.listening for held in crew.outcome(number).sockets)
    for number in (0, 1):
        crew.replace(number)


@pytest.mark.parametrize("by", ["all-to-all", "messages", "reduce-scatter"])
def test_abort_releases_ranks_that_hold_a_half_done_transfer(crew: Crew, tmp_path: Path, by: str) -> None:
    """Of megabytes, when a peer is killed (elastic/comm/held_waits.py)."""
    config = _config(2, tmp_path, by=by, numbers=12_000_000)
    for _ in range(3):
        crew.begin([0, 1, 2], "exchanges.for_ever", config, batch=BATCH)
        for number in (0, 1, 2):
            crew.reached(number, "there")
        crew.members[2].signal(signal.SIGKILL)
        crew.members[2].process.join()
        for number in (0, 1):
            crew.abort(number, "rank 2 was lost")
        for number in (0, 1):
            assert crew.outcome(number).result.kind in ("ended", "collective_failed")
        crew.replace(2)
    again = crew.run([2, 1, 0], "train", config, batch=BATCH)
    assert [outcome.result.kind for outcome in again] == ["finished"] * 3
    assert all(held.listening for outcome in again for held in outcome.sockets), "groups that gloo still holds"
    for number in (0, 1):
        crew.replace(number)


def test_a_killed_rank_is_named_by_the_ranks_that_see_it(crew: Crew, tmp_path: Path) -> None:
    config = _config(2, tmp_path, victim=2, at=1)
    crew.begin([0, 1, 2], "misbehaving.train_until_fault", config, batch=BATCH)
    for number in (0, 1, 2):
        crew.reached(number, "there")
    crew.members[2].signal(signal.SIGKILL)
    # The dead rank's neighbours fail by themselves; in a ring of three both survivors are neighbours, but the one may
    # hear of the other's leaving first.
    results = [crew.outcome(number).result for number in (0, 1)]
    assert {result.kind for result in results} == {"collective_failed"}, results
    assert 2 in {result.peer_rank for result in results}, results
    crew.replace(2)


def test_a_generation_that_nobody_joins_can_be_aborted(crew: Crew, tmp_path: Path) -> None:
    crew.begin([0], "train", _config(1, tmp_path), batch=BATCH, world_size=2)
    crew.in_collective(0)
    crew.abort(0, "rank 1 never came")
    result = crew.outcome(0).result
    assert (result.kind, result.message) == ("ended", "rank 1 never came")


def test_what_a_process_has_been_through_does_not_matter(crew: Crew, tmp_path: Path) -> None:
    crew.run([0, 1], "train", _config(3, tmp_path / "before"), batch=BATCH)
    crew.replace(1)
    mixed = crew.run([0, 1], "train", _config(2, tmp_path / "mixed"), batch=BATCH)
    [alone] = crew.run([1], "train", _config(2, tmp_path / "alone"), batch=BATCH)
    # Stage 3 changes DeepSpeed and torch for the whole process; undone, the gradients of both ranks match again.
    norms = [report.grad_norm for report in mixed[0].reports]
    assert norms == pytest.approx([report.grad_norm for report in alone.reports], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_rebuilding_leaks_nothing(crew: Crew, tmp_path: Path, stage: int) -> None:
    seen = []
    for _ in range(6):
        outcomes = crew.run([0, 1], "train", _config(stage, tmp_path), batch=BatchSettings(max_steps=2))
        # `clean` asks a weak reference to DeepSpeed's engine.
        assert all(outcome.clean for outcome in outcomes)
        seen.append([(outcome.threads, outcome.descriptors) for outcome in outcomes])
    assert seen[1:] == [seen[1]] * 5


def test_a_failing_rank_is_told_before_its_groups_close(crew: Crew, tmp_path: Path) -> None:
    crew.begin([0, 1, 2], "misbehaving.train_raises", _config(2, tmp_path, victim=1, at=2), batch=BATCH)
    result = crew.outcome(1).result
    assert (result.kind, result.error_type, result.step) == ("user_error", "builtins.ZeroDivisionError", 2)
    assert "train_raises" in result.traceback
    for number in (0, 2):
        crew.abort(number, "rank 1 raised")
        assert crew.outcome(number).result.kind in ("ended", "collective_failed")


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        ("misbehaving.returns_in_a_step", "usage_error", "returned in the middle of step 1"),
        ("misbehaving.skips_step", "usage_error", "before engine.step()"),
        ("misbehaving.steps_without_backward", "usage_error", "without engine.backward"),
        ("misbehaving.calls_backward_twice", "usage_error", "twice for one batch"),
        ("misbehaving.keeps_a_tensor", "usage_error", "elastic.state['weights']"),
        ("misbehaving.initializes_twice", "usage_error", "called twice"),
        ("misbehaving.exits", "user_error", "enough"),
        ("misbehaving.swallows_everything", "ended", "planned at step 2"),
    ],
)
def test_how_user_code_can_go_wrong(crew: Crew, tmp_path: Path, fn: str, kind: str, words: str) -> None:
    [outcome] = crew.run([0], fn, _config(1, tmp_path), batch=BATCH, end_at=2)
    assert outcome.result.kind == kind, outcome.result.traceback
    assert words in outcome.result.message
    assert outcome.clean


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("how", ["planned", "aborted", "returned"])
def test_what_follows_a_step_is_kept_through_a_change_of_the_world_size(
    crew: Crew, tmp_path: Path, stage: int, how: str
) -> None:
    """Step 4 is the last of epoch 0 (37 samples, 10 a step): what is done between the epochs belongs to it as well."""
    fn, saving = "train_with_more_after_each_step", {"batch": BATCH, "checkpoint_every_steps": 4}
    config = _config(stage, tmp_path / "cut")
    whole = crew.run([0, 1, 2], fn, _config(stage, tmp_path / "whole"), **saving)
    if how == "planned":
        crew.run([0, 1, 2], fn, config, end_at=4, **saving)
    elif how == "aborted":
        # The checkpoint that the cadence gives, of a generation that continues after it.
        crew.run([0, 1, 2], fn, config, end_at=5, **saving)
    else:
        crew.run([0, 1, 2], fn, {**config, "leave_after": 3}, **saving)
    step = 3 if how == "returned" else 4
    [checkpoint] = [found.id for found in CheckpointStore(str(tmp_path / "cut"), "run").list() if found.step == step]
    rest = crew.run([2, 0], fn, config, checkpoint=checkpoint, **saving)
    told, expected = rest[0].told, whole[0].told
    assert expected["state"] == {"counter": 6, "epochs": 2}
    assert told["state"] == expected["state"]
    assert torch.allclose(torch.tensor(told["weights"]), torch.tensor(expected["weights"]), atol=1e-6)
    assert torch.allclose(torch.tensor(told["average"]), torch.tensor(expected["average"]), atol=1e-6)
    assert _losses(rest) == pytest.approx(_losses(whole)[step:], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("stage", "late"), [(0, False), (0, True), (1, True), (2, False)])
def test_own_objects_go_on_through_a_change_of_the_world_size(
    crew: Crew, tmp_path: Path, stage: int, late: bool
) -> None:
    fn, saving = "train_with_own_objects", {"batch": BATCH, "checkpoint_every_steps": 3}
    whole = crew.run([0, 1, 2], fn, _config(stage, tmp_path / "whole", late=late), **saving)[0].told
    config = _config(stage, tmp_path / "cut", late=late)
    assert crew.run([0, 1, 2], fn, config, end_at=3, **saving)[0].result.kind == "ended"
    checkpoint = CheckpointStore(str(tmp_path / "cut"), "run").list()[0].id
    rest = crew.run([2, 0], fn, config, checkpoint=checkpoint, **saving)
    assert rest[0].result.kind == "finished", rest[0].result.traceback
    for outcome in rest:
        told = outcome.told
        assert told["lr"] == pytest.approx(whole["lr"], rel=1e-12)
        assert told["draws"] == whole["draws"][3:]
        for name, value in whole["shadow"].items():
            assert torch.allclose(torch.tensor(told["shadow"][name]), torch.tensor(value), atol=1e-6), name
        assert torch.allclose(torch.tensor(told["weights"]), torch.tensor(whole["weights"]), atol=1e-6)


def test_a_registered_object_that_is_missing_after_a_recovery_is_named(crew: Crew, tmp_path: Path) -> None:
    fn, config = "train_with_own_objects", _config(1, tmp_path)
    crew.run([0, 1], fn, config, batch=BATCH, end_at=2)
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
    outcomes = crew.run([0, 1], fn, {**config, "register": False}, batch=BATCH, checkpoint=checkpoint)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert "the state of 'average' (Average), which this training function has not registered" in (
        outcomes[0].result.message
    )


def _losses(outcomes: list[Outcome]) -> list[float]:
    """Of each step, the mean over the global batch: every rank reports its part."""
    return [sum(report.loss for report in step) for step in zip(*(found.reports for found in outcomes), strict=True)]


def test_an_unreadable_checkpoint_fails_on_every_rank(crew: Crew, tmp_path: Path) -> None:
    outcomes = crew.run([0, 1], "train", _config(2, tmp_path), batch=BATCH, checkpoint="step-00000004-g0001")
    assert {outcome.result.kind for outcome in outcomes} == {"restore_failed"}, outcomes[0].result.traceback
    assert {outcome.result.checkpoint for outcome in outcomes} == {"step-00000004-g0001"}


def test_another_batch_size_is_refused_on_resume(crew: Crew, tmp_path: Path) -> None:
    config = _config(1, tmp_path)
    crew.run([0, 1], "train", config, batch=BATCH, end_at=2)
    checkpoint = CheckpointStore(str(tmp_path), "run").list()[0].id
    outcomes = crew.run([0, 1], "train", config, batch=BATCH, checkpoint=checkpoint, seed=7)
    assert {outcome.result.kind for outcome in outcomes} == {"usage_error"}
    assert "seed 0, this run has 7" in outcomes[0].result.message


def test_data_workers_end_with_their_generation(crew: Crew, tmp_path: Path) -> None:
    plain = crew.run([0, 1], "train", _config(1, tmp_path / "plain"), batch=BATCH)
    outcomes = crew.run([0, 1], "train", _config(1, tmp_path / "workers", num_workers=2), batch=BATCH, end_at=3)
    for outcome, other in zip(outcomes, plain, strict=True):
        assert outcome.result.kind == "ended", outcome.result.traceback
        # Augmentation is seeded by position: who reads does not matter.
        assert [report.loss for report in outcome.reports] == [report.loss for report in other.reports[:3]]
    assert _children(crew.members[0].process.pid) == []


def _children(pid: int) -> list[str]:
    tasks = os.listdir(f"/proc/{pid}/task")
    return [child for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
