"""A step whose loss or gradient is non-finite: what the run goes back to, what it leaves out, and when it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import snapshot_id
from elastic.core.run import machine
from elastic.core.run.phase import GAVE_UP, Ending, Finished, Training, Waiting
from elastic.core.settings import AnomalySettings, AuditSettings


def scenario(memory: bool = False, **anomalies: Any) -> Scenario:
    run = Scenario(memory=memory)
    settings = replace(run.state.settings, anomalies=AnomalySettings(**anomalies))
    run.state = replace(run.state, settings=settings)
    return run.started(3)


def found(run: Scenario, step: int, *workers: int, start: int | None = None, kind: str = "gradient") -> Scenario:
    """These members find the step after `step` finished ones to be no good; batches are of ten."""
    positions = ((start if start is not None else step * 10, (start if start is not None else step * 10) + 10),)
    who = workers or run.state.members
    return run.do(*(ev.AnomalyFound(run.state.generation, w, step, kind, "nan", positions) for w in who))


def begun(run: Scenario) -> act.BeginGeneration:
    (begin,) = run.acts(act.BeginGeneration)
    return begin


def test_the_run_goes_back_and_leaves_the_samples_out() -> None:
    run = scenario().commit(10)
    found(run, 13)
    assert isinstance(run.phase, Ending)
    assert "rank 0 on node node-0: the gradient of step 14 is nan" in run.said()
    assert "samples 130 to 139 are skipped, step 14 is done with the next ones" in run.said()
    run.left(13)
    assert begun(run) == act.BeginGeneration(2, (0, 1, 2), "c10", 10, ((130, 140),))
    run.train()
    assert isinstance(run.phase, Training)
    (incident,) = run.acts(act.CloseIncident)
    assert (incident.incident.kind, incident.incident.step, incident.incident.steps_repeated) == ("anomaly", 13, 3)
    assert len(incident.incident.also) == 2, "who else saw it is kept"


def test_every_member_tells_and_it_counts_once() -> None:
    run = scenario()
    found(run, 4)
    found(run, 4, 1, kind="loss")
    assert len(run.state.trouble.anomalies) == 1
    assert run.state.trouble.skips == ((40, 50),)
    assert run.state.trouble.incident is not None
    assert "rank 1 on node node-1: the loss of step 5 is nan" in run.state.trouble.incident.also


def test_skipped_ranges_add_up_and_every_later_generation_gets_them() -> None:
    run = scenario().commit(4)
    found(run, 4).left(4)
    run.train()
    found(run, 4, start=50).left(4)
    assert begun(run).skips == ((40, 60),)
    run.train()
    run.broken(0, step=5)
    assert begun(run).skips == ((40, 60),)


def test_it_is_no_crash_and_fresh_processes_are_not_called_for() -> None:
    run = scenario()
    for step in range(4):
        found(run, step, start=step * 20).left(step)
        assert "pause" not in run.said()
        assert run.acts(act.StartWorker) == []
        run.train()
    assert run.state.trouble.streaks.crashes == 0


def test_a_checkpoint_that_lies_behind_it_never_counts() -> None:
    run = scenario().commit(10)
    run.broken(0, step=12)
    run.train()
    assert run.state.generation == 2
    found(run, 13)
    # Of the generation before, complete only now: its step 14 took the samples that are left out.
    run.do(ev.CheckpointCommitted("late", 20, 1))
    assert "checkpoint late is ignored: it was made after an anomaly" in run.said()
    run.do(ev.CheckpointCommitted("before", 13, 1))
    run.left(13)
    assert begun(run).checkpoint == "before"
    run.train()
    run.do(ev.CheckpointCommitted("new", 20, 3))
    assert run.state.saved.newest_checkpoint is not None
    assert run.state.saved.newest_checkpoint.id == "new"


def test_a_snapshot_that_lies_behind_it_never_counts() -> None:
    run = scenario(memory=True)
    found(run, 13).left(13)
    assert isinstance(run.phase, Waiting)
    assert run.state.saved.survey is not None
    held = ((snapshot_id(14, 1), 14), (snapshot_id(13, 1), 13), (snapshot_id(12, 1), 12))
    run.do(ev.SnapshotsReported(run.state.saved.survey.number, held))
    assert (begun(run).checkpoint, begun(run).step) == (snapshot_id(13, 1), 13)


def test_the_policy_may_be_to_stop() -> None:
    run = scenario(policy="stop").commit(10)
    found(run, 13).left(13)
    assert run.end[0] == GAVE_UP
    assert "the gradient of step 14 is nan; the policy is to stop" in run.end[1]
    assert run.state.saved.newest_checkpoint is not None


def test_too_many_within_the_window_end_the_run() -> None:
    run = scenario(max_anomalies=2, window_steps=10)
    for step, start in ((1, 10), (8, 90)):
        found(run, step, start=start).left(step)
        run.train()
    # The first is out of the window by now.
    found(run, 12, start=140).left(12)
    run.train()
    found(run, 12, start=150).left(12)
    assert run.end[0] == GAVE_UP
    assert run.end[1].startswith("3 anomalies within 10 steps (at most 2 are tolerated); the last one: rank 0")


def test_one_that_comes_with_a_lost_node_is_left_out_too() -> None:
    run = scenario().commit(10)
    run.lose_node(2)
    found(run, 13, 0, 1)
    run.left(13, 0, 1)
    assert run.state.trouble.incident is not None
    assert run.state.trouble.incident.kind == "node-lost"
    assert begun(run).skips == ((130, 140),)


def test_what_an_old_generation_or_a_stranger_says_changes_nothing() -> None:
    run = scenario()
    before = run.state
    run.do(ev.AnomalyFound(run.state.generation, 99, 3, "loss", "nan", ((30, 40),)))
    assert run.state == before
    run.broken(0)
    after = run.state
    run.do(ev.AnomalyFound(1, 0, 3, "loss", "nan", ((30, 40),)))
    assert run.state == after


def test_steps_that_were_skipped_are_bounded() -> None:
    run = scenario(policy="skip", max_anomalies=2, window_steps=10)
    for step in (3, 4):
        run.do(ev.StepSkipped(1, step, "the gradient is nan", ((step * 10 - 10, step * 10),)))
        assert isinstance(run.phase, Training)
    assert "step 4 was not applied: the gradient is nan; samples 30 to 39 are skipped" in run.said()
    assert run.state.trouble.skips == (), "the step is over: nothing is done with the next samples instead"
    run.do(ev.StepSkipped(1, 5, "the gradient is nan", ((40, 50),)))
    assert isinstance(run.phase, Ending)
    run.left(5)
    assert run.end[0] == GAVE_UP
    assert "3 anomalies within 10 steps" in run.end[1]


def test_a_resumed_run_leaves_out_what_was_left_out() -> None:
    run = Scenario()
    run.do(ev.RunStarted((("c10", 10),), 4, ((130, 140),))).nodes(3)
    assert begun(run) == act.BeginGeneration(5, (0, 1, 2), "c10", 10, ((130, 140),))


def test_a_restarted_controller_knows_it_all_from_its_journal() -> None:
    run = scenario().commit(10)
    found(run, 13).left(13)
    replayed = replace(machine.initial(run.state.settings, 1000.0), settings=run.state.settings)
    for event, now in run.journal:
        assert ev.from_json(_through_json(event)) == event
        replayed, _ = machine.step(replayed, event, now)
    assert replayed == run.state
    (begin,) = (action for action in machine.reissue(replayed) if isinstance(action, act.BeginGeneration))
    assert begin.skips == ((130, 140),)


def _through_json(event: ev.Event) -> Any:
    return json.loads(json.dumps(ev.to_json(event)))


def given_up(step: int = 13) -> Scenario:
    """The weights after `step` steps are good, and lie in the nodes' memory only."""
    run = found(scenario(memory=True, policy="stop").commit(10), step)
    run.left(step)
    survey = run.acts(act.QuerySnapshots)[-1].survey
    return run.do(ev.SnapshotsReported(survey, ((snapshot_id(step, 1), step),)))


def test_what_only_memory_has_is_saved_before_the_run_is_given_up() -> None:
    run = given_up()
    assert begun(run) == act.BeginGeneration(2, (0, 1, 2), snapshot_id(13, 1), 13, stops_at_start=True)
    # Killed here, the next controller begins it in the same way.
    run.do(ev.ControllerRestarted(2))
    assert begun(run).stops_at_start
    run.join()
    assert run.acts(act.CommitStop) == [act.CommitStop(2, (0, 1, 2), 13, durable=True, last=True)]
    assert not run.acts(act.ProposeStop), "no step is promised, and none is done"
    run.left(13)
    assert not isinstance(run.phase, Finished), "it waits for storage"
    run.commit(13)
    assert run.end[0] == GAVE_UP
    assert "the gradient of step 14 is nan; the policy is to stop" in run.end[1]


def test_saving_it_is_tried_once_and_does_not_take_for_ever() -> None:
    broken = given_up().broken(0, step=13)
    assert broken.end[0] == GAVE_UP
    assert "the policy is to stop" in broken.end[1]
    late = given_up().join()
    late.left(13).wait(late.state.settings.failures.drain_timeout_s)
    assert late.end[0] == GAVE_UP
    assert "storage has not taken the checkpoint of step 13" in late.said()


def test_a_run_that_storage_has_all_of_is_given_up_at_once() -> None:
    run = found(scenario(memory=True, policy="stop").commit(13), 13)
    run.left(13)
    survey = run.acts(act.QuerySnapshots)[-1].survey
    run.do(ev.SnapshotsReported(survey, ((snapshot_id(13, 1), 13),)))
    assert run.end[0] == GAVE_UP


@pytest.mark.parametrize("policy", ["rollback", "skip"])
def test_an_anomaly_at_a_planned_end_ends_it(policy: str) -> None:
    run = scenario(policy=policy).commit(3)
    run.nodes(1).do(ev.StopRequested("enough"))
    found(run, 3).left(3)
    assert run.end == ("stopped", "enough")


def refused(
    run: Scenario, step: int, *ranks: int, decided: bool = True, agreed: int | None = None, sound: int | None = None
) -> Scenario:
    """An audit of the step after `step` finished ones names these ranks; every member tells."""
    told = (ranks, decided, "they differ by 0.5", agreed, sound)
    return run.do(*(ev.AuditFailed(run.state.generation, w, step, *told) for w in run.state.members))


def audited(strikes: int = 2, rollback: Literal["newest", "agreed"] = "newest", **anomalies: Any) -> Scenario:
    run = Scenario()
    audit = AuditSettings(1, strikes, rollback)
    settings = replace(run.state.settings, audit=audit, anomalies=AnomalySettings(**anomalies))
    run.state = replace(run.state, settings=settings)
    return run.started(3)


def test_a_step_that_an_audit_refuses_is_done_again_with_its_samples() -> None:
    run = audited().commit(10)
    refused(run, 13, 1, agreed=12)
    assert isinstance(run.phase, Ending)
    assert "audit of step 14: they differ by 0.5; wrong: rank 1 on node node-1; the step is done again" in run.said()
    assert "Steps since the audit of step 12 are suspect: older is checkpoint c10 (step 10)" in run.said()
    run.left(13)
    assert begun(run) == act.BeginGeneration(2, (0, 1, 2), "c10", 10, ())
    run.train()
    (incident,) = run.acts(act.CloseIncident)
    assert (incident.incident.kind, incident.incident.step) == ("audit", 13)
    assert run.state.trouble.miscomputed == {"node-1": 1}
    assert run.acts(act.StartWorker) == []


def test_what_was_saved_beyond_the_step_does_not_count() -> None:
    run = audited().commit(4).commit(14)
    refused(run, 13, 1).left(13)
    assert begun(run).checkpoint == "c4"


def test_the_run_may_go_back_to_before_the_last_audit_in_which_all_agreed() -> None:
    run = audited(rollback="agreed").commit(8).commit(12)
    refused(run, 13, 1, agreed=10)
    assert "Steps since the audit of step 10 are suspect: the run goes back to checkpoint c8 (step 8)" in run.said()
    run.left(13)
    assert begun(run).checkpoint == "c8"
    run.train().commit(9)
    # No audit has agreed in this generation: what it has done since is as suspect.
    refused(run, 14, 1).left(14)
    assert begun(run).checkpoint == "c8"


def test_what_was_saved_while_memory_changed_does_not_count() -> None:
    """The snapshot of the step before was read in the same time."""
    run = audited().commit(10).commit(13)
    refused(run, 13, 1, agreed=13, sound=12)
    assert "what was saved after step 12 is not used. Steps since the audit of step 12 are suspect" in run.said()
    run.left(13)
    assert begun(run).checkpoint == "c10"
    run = audited(rollback="agreed").commit(12).commit(14)
    refused(run, 14, 1, agreed=14, sound=13).left(14)
    assert begun(run).checkpoint == "c12"


@pytest.mark.parametrize("rollback", ["newest", "agreed"])
def test_a_snapshot_from_while_memory_changed_is_passed_over(rollback: Literal["newest", "agreed"]) -> None:
    run = audited(rollback=rollback)
    run.state = replace(
        run.state, settings=replace(run.state.settings, snapshots=Scenario(memory=True).state.settings.snapshots)
    )
    refused(run, 13, 1, sound=12).left(13)
    survey = run.acts(act.QuerySnapshots)[-1].survey
    run.do(ev.SnapshotsReported(survey, ((snapshot_id(13, 1), 13), (snapshot_id(12, 1), 12))))
    assert begun(run).checkpoint == snapshot_id(12, 1)


def test_what_an_earlier_attempt_went_back_from_does_not_count() -> None:
    run = Scenario(2, 2).do(ev.RunStarted((("c8", 8),), 4, undone=((2, 8),)))
    counts = run.state.trouble.counts
    assert [counts(*known) for known in ((1, 12), (2, 9), (2, 8), (3, 12))] == [False, False, True, True]
    run.nodes(2)
    assert begun(run).checkpoint == "c8"


def test_where_no_checkpoint_is_old_enough_the_newest_state_is_taken() -> None:
    run = audited(rollback="agreed").commit(12)
    refused(run, 13, 1, agreed=10)
    assert "Steps since the audit of step 10 are suspect: no checkpoint is older" in run.said()
    run.left(13)
    assert begun(run).checkpoint == "c12"


def test_a_node_that_audits_name_again_is_left() -> None:
    run = audited().commit(10)
    refused(run, 13, 1).left(13)
    run.train()
    refused(run, 15, 1)
    assert "node node-1 is left: 2 audits have named it" in run.said()
    run.left(15)
    assert begun(run).members == (0, 2)
    run.train()
    assert "node node-1 is quarantined" in run.said()


def test_a_node_that_is_needed_is_kept_and_said_so() -> None:
    run = audited(strikes=1)
    scaling = replace(run.state.settings.scaling, min_workers=3)
    run.state = replace(run.state, settings=replace(run.state.settings, scaling=scaling))
    refused(run, 3, 1)
    assert "node node-1 is kept, although 1 audit has named it: 2 of 3 would be left" in run.said()
    run.left(3)
    assert begun(run).members == (0, 1, 2)


def test_nobody_is_struck_without_a_majority_and_the_budget_of_anomalies_counts() -> None:
    run = audited(strikes=1, max_anomalies=1)
    refused(run, 3, 0, 1, decided=False)
    assert "either of rank 0 on node node-0, rank 1 on node node-1 is wrong" in run.said()
    assert "Steps since the last one whose record says `audit: agreed` are suspect" in run.said()
    assert run.state.trouble.miscomputed == {}
    assert run.state.fleet.evicted == ()
    run.left(3).train()
    refused(run, 3, 0, 1, decided=False).left(3)
    assert "2 anomalies within 1000 steps (at most 1 are tolerated)" in run.said()


def test_an_audit_that_is_told_late_or_by_strangers_changes_nothing() -> None:
    run = audited(strikes=1)
    run.do(ev.AuditFailed(run.state.generation, 99, 3, (1,), True, "lie"))
    run.do(ev.AuditFailed(0, 0, 3, (1,), True, "lie"))
    assert isinstance(run.phase, Training)
    assert run.state.trouble.miscomputed == {}
