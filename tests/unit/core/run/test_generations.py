"""Planned ends: growth, stops, and the end of the run itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.data.adaptive_batch import AdaptiveBatch
from elastic.core.run.phase import USAGE, Closing, Ending, Joining, Pausing, Training, Waiting
from elastic.core.settings import CommunicationSettings


def test_growth_holds_everybody_at_one_step_and_goes_on_from_its_checkpoint() -> None:
    s = Scenario(2, 3).started(2).nodes(1)
    assert isinstance(s.phase, Pausing)
    assert s.acts(act.ProposeStop) == [act.ProposeStop(1, (0, 1))]
    s.do(ev.StopPromised(1, 0, 7))
    assert not s.acts(act.CommitStop)
    s.do(ev.StopPromised(1, 1, 8))
    assert s.acts(act.CommitStop) == [act.CommitStop(1, (0, 1), 8)]
    s.left(8)
    assert isinstance(s.phase, Pausing), "the checkpoint is waited for"
    s.commit(8)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (0, 1, 2), "c8", 8)]
    s.train()
    incident = s.acts(act.CloseIncident)[0].incident
    assert (incident.kind, incident.planned, incident.steps_repeated) == ("resize", True, 0)
    assert (incident.world_size, incident.next_world_size) == (2, 3)


def test_growth_waits_for_the_first_step_and_for_workers_that_are_still_starting() -> None:
    s = Scenario(2, 4).do(ev.RunStarted()).nodes(2).wait(5).nodes(1)
    assert isinstance(s.phase, Joining)
    s.join().do(ev.SlotPlaced(3, "node-3"))
    s.do(ev.FirstStepDone(1, 1))
    assert isinstance(s.phase, Training), "worker 3 is about to come"
    s.do(ev.WorkerReady(3, 1, "host"))
    assert isinstance(s.phase, Pausing)


def test_growth_waits_while_storage_fails() -> None:
    s = Scenario(2, 3).started(2).do(ev.SaveFailing(5, "503", 1.0)).nodes(1)
    assert isinstance(s.phase, Training)
    assert isinstance(s.commit(5).phase, Pausing)


def test_growth_does_not_wait_for_storage_where_memory_takes_the_last_step() -> None:
    s = Scenario(2, 3, memory=True).started(2).do(ev.SaveFailing(5, "503", 1.0, 1)).nodes(1)
    assert isinstance(s.phase, Pausing)
    s = Scenario(2, 3, memory=True).started(2).do(ev.SaveFailing(5, "503", 1.0, 1), ev.MemoryLost(1, 0, "full"))
    assert isinstance(s.nodes(1).phase, Training)


def test_the_reason_for_lost_snapshots_is_noted_and_not_that_another_rank_has_it() -> None:
    s = Scenario(2, 2, memory=True).started(2).do(ev.MemoryLost(1, 0, ""))
    assert not s.said()
    s.do(ev.MemoryLost(1, 1, "10.0.0.2:5 takes no replica of rank 1"))
    assert "rank 1 on node node-1 reports: 10.0.0.2:5 takes no replica" in s.said()
    assert not s.do(ev.MemoryLost(1, 0, "also lost")).said(), "said once"
    assert isinstance(s.phase, Training)


def test_lost_snapshots_that_are_required_end_the_run() -> None:
    s = Scenario(2, 2, memory=True)
    settings = s.state.settings
    s.state = replace(s.state, settings=replace(settings, snapshots=replace(settings.snapshots, required=True)))
    s.started(2).do(ev.MemoryLost(1, 1, "10.0.0.2:5 takes no replica of rank 1")).left(3)
    status, reason = s.end
    assert status == USAGE
    assert "10.0.0.2:5 takes no replica of rank 1" in reason


def test_failing_storage_of_an_earlier_generation_does_not_forbid_growth_for_ever() -> None:
    s = Scenario(2, 3).started(2).do(ev.SaveFailing(5, "503", 1.0)).broken(0)
    s.train().nodes(1)
    assert isinstance(s.phase, Pausing)


def test_a_member_that_dies_while_everybody_holds_makes_it_a_failure() -> None:
    s = Scenario(1, 3).started(2).nodes(1).do(ev.StopPromised(1, 0, 7), ev.WorkerDied(1, "exit code -9"))
    assert isinstance(s.phase, Ending)
    assert s.acts(act.EndGeneration)[0].workers == (0,)
    s.left(6)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)
    assert s.train().acts(act.CloseIncident)[0].incident.kind == "worker-lost"


def test_a_member_that_left_is_needed_until_the_checkpoint_is_complete() -> None:
    s = Scenario(1, 3).started(2).nodes(1).do(ev.StopPromised(1, 0, 7), ev.StopPromised(1, 1, 7)).left(7)
    s.do(ev.WorkerDied(1, "exit code -9"))
    assert s.acts(act.BeginGeneration)[0].step == 0, "nobody waits a minute for a checkpoint that cannot come"


def test_storage_that_does_not_take_the_checkpoint_costs_the_steps_not_the_growth() -> None:
    s = Scenario(2, 3, drain_timeout_s=20).started(2).nodes(1)
    s.do(ev.StopPromised(1, 0, 7), ev.StopPromised(1, 1, 7)).left(7).wait(20)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (0, 1, 2), None, 0)]
    assert "7 steps will be repeated" in s.said()


def test_a_batch_that_is_smaller_than_configured_is_told() -> None:
    for adaptive, told in ((None, False), (AdaptiveBatch("sqrt"), True)):
        s = Scenario(2, 3)
        s.state = replace(s.state, settings=replace(s.state.settings, adaptive_batch=adaptive))
        s.started(3).do(ev.WorkerDied(2, "exit code -9")).left(0)
        assert "generation 2 begins with 2 workers" in s.said()
        assert ("steps of 2/3 of the configured batch, with a learning rate to match" in s.said()) == told


def test_the_outer_steps_that_are_lost_are_named() -> None:
    """And islands have a round's time to stop."""
    s = Scenario(2, 3, drain_timeout_s=20)
    local = CommunicationSettings("local", "diloco", every_steps=3)
    s.state = replace(s.state, settings=replace(s.state.settings, communication=local))
    s.started(2).nodes(1).do(ev.StopPromised(1, 0, 9)).wait(59)
    assert isinstance(s.phase, Pausing)
    s.do(ev.StopPromised(1, 1, 9)).left(9).wait(1)
    assert "9 steps will be repeated, and with them the outer steps of 3, 6, 9" in s.said()


def test_a_run_whose_end_comes_before_that_of_a_round_ends_there() -> None:
    s = Scenario(2, 3).started(2).nodes(1).do(ev.StopPromised(1, 0, 30), ev.StopPromised(1, 1, 30)).completed(14)
    assert isinstance(s.phase, Closing)
    assert s.phase.step == 14


def test_who_does_not_stop_in_time_is_ended() -> None:
    s = Scenario(2, 3, drain_timeout_s=20, abort_timeout_s=3).started(2).nodes(1).do(ev.StopPromised(1, 0, 7)).wait(20)
    assert isinstance(s.phase, Ending)
    s.left(7, 0).wait(3)
    assert [kill.worker for kill in s.acts(act.KillWorker)] == [1]


def test_the_end_of_the_run_may_overtake_the_planned_one() -> None:
    s = Scenario(2, 3).started(2).nodes(1).do(ev.StopPromised(1, 0, 9))
    s.completed(9, 1)
    assert s.acts(act.CommitStop) == [act.CommitStop(1, (0,), 9)], "the end of rank 1 is its answer"
    s.left(9, 0)
    assert isinstance(s.phase, Closing)
    assert s.commit(9).end[0] == "finished"


# --- stops -----------------------------------------------------------------------------------------------------------


def test_a_stop_while_training_saves_first() -> None:
    s = Scenario(2, 2).started(2).do(ev.StopRequested("a person asked"))
    s.do(ev.StopPromised(1, 0, 7), ev.StopPromised(1, 1, 7)).left(7)
    assert isinstance(s.phase, Pausing)
    assert s.commit(7).end == ("stopped", "a person asked")
    assert s.acts(act.CloseIncident)[0].incident.kind == "stop"
    assert {release.slot for release in s.acts(act.ReleaseSlot)} == {0, 1}


def test_a_stop_while_waiting_is_immediate_and_nothing_is_asked_for_any_more() -> None:
    s = Scenario(2, 2).do(ev.RunStarted()).nodes(1).do(ev.StopRequested("enough"))
    assert s.end == ("stopped", "enough")


def test_a_stop_while_joining_waits_for_the_first_step() -> None:
    s = Scenario(2, 2).do(ev.RunStarted()).nodes(2).do(ev.StopRequested("enough"))
    assert isinstance(s.phase, Joining)
    assert isinstance(s.train().phase, Pausing)


def test_a_stop_while_ending_stops_when_everybody_has_left() -> None:
    s = Scenario(2, 2).started(2).do(ev.CollectiveFailed(1, 0, 3, "peer closed"), ev.StopRequested("enough"))
    assert isinstance(s.phase, Ending)
    assert s.left(3).end == ("stopped", "enough")


def test_the_first_reason_for_a_stop_counts() -> None:
    s = Scenario(2, 2).started(2).do(ev.StopRequested("first"), ev.StopRequested("second"))
    assert s.state.stop_reason == "first"


# --- the end of the run ----------------------------------------------------------------------------------------------


def test_completion_waits_for_the_last_checkpoint() -> None:
    s = Scenario(2, 2).started(2).commit(5).completed(9, 0)
    assert isinstance(s.phase, Training)
    s.completed(9, 1)
    assert isinstance(s.phase, Closing)
    s.do(ev.CheckpointCommitted("late", 8, 1))
    assert isinstance(s.phase, Closing)
    assert s.commit(9).end == ("finished", "all 9 steps are done and saved")


def test_a_checkpoint_that_was_there_first_is_enough() -> None:
    assert Scenario(2, 2).started(2).commit(9).completed(9).end[0] == "finished"


def test_a_run_that_was_done_already_completes_without_a_step() -> None:
    s = Scenario(2, 2).do(ev.RunStarted((("c9", 9),), 4)).nodes(2)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(5, (0, 1), "c9", 9)]
    assert s.completed(9).end[0] == "finished"


def test_a_function_that_returns_early_has_not_finished_the_run() -> None:
    s = Scenario(2, 2).started(2).completed(4, reached_end=False).commit(4)
    status, reason = s.end
    assert (status, reason.partition(";")[0]) == (
        "not-finished",
        "the training function returned after 4 steps, before the end of the run",
    )


def test_function_that_returned_before_its_first_step_is_not_waited_for() -> None:
    s = Scenario(2, 2).started(2).completed(0, reached_end=False)
    status, reason = s.end
    assert (status, reason.partition(";")[0]) == (
        "not-finished",
        "the training function returned after 0 steps, before the end of the run",
    )


def test_a_last_checkpoint_that_never_comes_ends_the_wait() -> None:
    s = Scenario(2, 2, storage_timeout_s=30).started(2).completed(9).wait(30)
    assert s.end[0] == "not-finished"
    assert "step 9" in s.end[1]


def test_whoever_cannot_reach_storage_is_named_once_and_in_the_end() -> None:
    s = Scenario(2, 3, storage_timeout_s=30).started(3).do(ev.SaveFailing(5, "no answer", 1.0, 1))
    assert s.said() == (
        "rank 1 on node node-1 cannot write its part of the checkpoint of step 5: no answer; training continues, "
        "next try in 1.0 s"
    )
    assert not s.do(ev.SaveFailing(5, "no answer", 2.0, 1)).said()
    assert s.do(ev.SaveFailing(10, "no answer", 0.0, 2)).said().startswith("rank 2 on node node-2 cannot write")
    assert "again: c10" in s.commit(10).said()
    assert "rank 1 on node node-1" in s.do(ev.SaveFailing(15, "no answer", 1.0, 1)).said(), "news once more"
    assert s.completed(20).wait(30).end == (
        "not-finished",
        "training is done, but storage has not taken the checkpoint of step 20: rank 1 on node node-1 cannot write "
        "to it",
    )


def test_the_last_checkpoint_is_made_by_those_who_reach_storage() -> None:
    s = Scenario(2, 3, memory=True, storage_timeout_s=30).started(3).commit(5).do(ev.SaveFailing(10, "no", 1.0, 1))
    s.completed(20).wait(30)
    assert isinstance(s.phase, Waiting)
    s.do(ev.SnapshotsReported(s.state.saved.surveys, (("memory:step-00000020-g0001", 20),)))
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (0, 2), "memory:step-00000020-g0001", 20)]
    incident = s.state.trouble.incident
    assert incident is not None
    assert (incident.kind, incident.planned, incident.steps_repeated) == ("resize", True, 0)
    s.join().completed(20)
    assert isinstance(s.phase, Closing)
    assert s.commit(20).end == ("finished", "all 20 steps are done and saved")


@pytest.mark.parametrize(("low", "memory", "cut"), [(3, True, (1,)), (2, False, (1,)), (1, True, (0, 1, 2))])
def test_where_too_few_can_the_run_ends_without_it(low: int, memory: bool, cut: tuple[int, ...]) -> None:
    s = Scenario(low, 3, memory=memory, storage_timeout_s=30).started(3)
    s.do(*(ev.SaveFailing(10, "no answer", 1.0, worker) for worker in cut))
    assert s.completed(20).wait(30).end[0] == "not-finished"


def test_a_last_checkpoint_that_comes_while_the_others_begin_is_enough() -> None:
    s = Scenario(2, 3, memory=True, storage_timeout_s=30).started(3).do(ev.SaveFailing(10, "no answer", 1.0, 1))
    s.completed(20).wait(30)
    assert s.do(ev.CheckpointCommitted("c20", 20, 1)).end[0] == "finished"


def test_where_nobody_can_reach_storage_not_everybody_is_named() -> None:
    s = Scenario(20, 20, storage_timeout_s=30).started(20)
    said = s.do(*(ev.SaveFailing(5, "no answer", 1.0, worker) for worker in range(20))).said().splitlines()
    assert len(said) == 9
    assert said[-1].startswith("more than 8 workers cannot write")
    assert s.completed(20).wait(30).end[1].endswith("rank 7 on node node-7 and 12 more cannot write to it")


@pytest.mark.parametrize("loss", ["node", "worker", "silence"])
def test_a_loss_before_the_last_checkpoint_is_complete_repeats_the_end(loss: str) -> None:
    s = Scenario(2, 3).started(3).commit(5).completed(9)
    if loss == "node":
        s.lose_node(2)
    elif loss == "worker":
        s.do(ev.WorkerDied(2, "exit code -9"))
    else:
        s.do(ev.WorkersSilent((2,), 1.0, ("node-2",))).wait(0.5)
    assert isinstance(s.phase, Ending)
    s.left(9)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (0, 1), "c5", 5)]


def test_a_last_checkpoint_that_comes_after_all_ends_the_run_without_another_generation() -> None:
    s = Scenario(2, 2).started(2).completed(9).lose_node(1).left(9)
    assert isinstance(s.phase, Waiting)
    assert s.do(ev.CheckpointCommitted("c9", 9, 1)).end[0] == "finished"


def test_one_member_completes_while_the_others_fail() -> None:
    s = Scenario(2, 3).started(3).commit(5).completed(9, 0).do(ev.CollectiveFailed(1, 1, 8, "peer closed"))
    s.completed(9, 2).left(8, 0, 1)
    assert not s.acts(act.KillWorker)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (0, 1, 2), "c5", 5)]


def test_a_member_that_completes_while_its_generation_ends_has_left() -> None:
    s = Scenario(2, 2).started(2).do(ev.CollectiveFailed(1, 0, 8, "peer closed")).left(8, 0).completed(9, 1)
    assert s.acts(act.BeginGeneration)[0].members == (0, 1)
    assert s.state.furthest_step == 9


def test_only_new_bytes_give_a_restore_more_time() -> None:
    s = Scenario(2, 2, join_timeout_s=60).do(ev.RunStarted()).nodes(2).do(ev.GroupJoined(1, 0), ev.GroupJoined(1, 1))
    for read in (10, 20, 30):
        s.wait(50).do(ev.RestoreProgressed(1, 0, read))
    assert isinstance(s.state.phase, Joining)
    s.wait(50).do(ev.RestoreProgressed(1, 0, 30), ev.RestoreProgressed(1, 0, 5), ev.RestoreProgressed(0, 1, 99))
    assert isinstance(s.state.phase, Joining)
    s.wait(10)
    assert isinstance(s.state.phase, Ending)
    assert s.state.phase.kind == "hang"
    assert "no progress for 60 s, 30 bytes of state restored" in s.state.phase.evidence


def test_a_set_up_that_makes_progress_is_no_hang() -> None:
    s = Scenario(2, 2, join_timeout_s=60).do(ev.RunStarted()).nodes(2).do(ev.GroupJoined(1, 0), ev.GroupJoined(1, 1))
    for _ in range(3):
        s.wait(50).do(ev.SetUpProgressed(1, 0))
    assert isinstance(s.state.phase, Joining)
    s.do(ev.TrainingReached(1, 0, 0)).wait(50).do(ev.SetUpProgressed(1, 0), ev.SetUpProgressed(0, 1)).wait(10)
    assert isinstance(s.state.phase, Ending), "what a member does that trains already brings nobody nearer"
    assert s.state.phase.kind == "hang"
