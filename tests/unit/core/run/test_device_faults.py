"""What a worker's GPU reports while it trains: said, and left where it is unfit and enough others remain."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import snapshot_id
from elastic.core.run.phase import Joining, Pausing, Training

WHY = "Xid 48: a double-bit error of its memory"


def scenario(policy: Literal["off", "report", "evict"] = "evict", low: int = 2) -> Scenario:
    run = Scenario(low, 3, memory=True)
    run.state = replace(run.state, settings=replace(run.state.settings, device_faults=policy))
    return run


def fails(run: Scenario, worker: int = 1, unfit: bool = True) -> Scenario:
    return run.do(ev.DeviceFailed(worker, "3", WHY, unfit))


def notes(run: Scenario) -> list[act.Note]:
    return [note for note in run.acts(act.Note) if note.kind == "device"]


@pytest.mark.parametrize(("policy", "unfit"), [("report", True), ("evict", False)])
def test_it_is_said_and_nothing_else_is_done(policy: Literal["report", "evict"], unfit: bool) -> None:
    run = fails(scenario(policy).started(3), unfit=unfit)
    assert isinstance(run.phase, Training)
    (note,) = notes(run)
    assert note.sentence == f"GPU 3 of rank 1 on node node-1: {WHY}"
    assert note.data == {"worker": 1, "node": "node-1", "gpu": "3", "unfit": unfit}


def test_an_unfit_device_is_left_at_a_step_boundary_and_its_node_quarantined() -> None:
    run = fails(scenario().started(3))
    assert isinstance(run.phase, Pausing)
    run.do(*(ev.StopPromised(1, w, 41, memory=True) for w in (0, 1, 2)))
    run.left(41)
    survey = run.state.saved.survey
    assert survey is not None
    run.do(ev.SnapshotsReported(survey.number, ((snapshot_id(41, 1), 41),)))
    (begin,) = run.acts(act.BeginGeneration)
    assert (begin.members, begin.step) == ((0, 2), 41)
    run.train()
    (released,) = run.acts(act.ReleaseSlot)
    assert released.slot == 1
    (request,) = run.acts(act.RequestSlot)
    assert request.avoid == ("node-1",)
    assert run.state.fleet.evicted == ()


def test_a_generation_that_has_just_begun_is_left_after_its_first_step() -> None:
    run = scenario()
    run.do(ev.RunStarted()).nodes(3).wait(5.0)
    run.join()
    assert isinstance(run.phase, Training)
    fails(run)
    assert isinstance(run.phase, Training), "no step of this generation could be kept"
    run.do(ev.FirstStepDone(1, 1))
    assert isinstance(run.phase, Pausing)


def test_a_device_that_breaks_the_generation_is_not_in_the_next() -> None:
    """Its peers have lost it by the time that its driver has said why."""
    run = scenario().started(3)
    run.do(ev.CollectiveFailed(1, 0, 5, "NCCL"))
    fails(run)
    assert not run.acts(act.ReleaseSlot), "the newest step may lie in its node's memory only"
    run.left(5)
    survey = run.state.saved.survey
    assert survey is not None
    run.do(ev.SnapshotsReported(survey.number, ((snapshot_id(5, 1), 5),)))
    (begin,) = run.acts(act.BeginGeneration)
    assert begin.members == (0, 2)
    assert isinstance(run.phase, Joining)


def test_a_run_that_needs_it_keeps_it_and_says_so() -> None:
    run = fails(scenario(low=3).started(3))
    assert isinstance(run.phase, Training)
    assert "rank 1 on node node-1 is kept: 2 would be left of at least 3" in run.said()
    assert run.state.fleet.evicted == ()


def test_a_worker_that_is_gone_says_nothing() -> None:
    assert notes(fails(scenario().started(3), worker=99)) == []
