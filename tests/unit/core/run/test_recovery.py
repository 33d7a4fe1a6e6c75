"""Failures: what each kind of evidence does, what it costs, and when it ends the run."""

from __future__ import annotations

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.run.phase import Ending, Joining, Training, Waiting


def test_survivors_go_on_at_once_when_there_are_enough() -> None:
    s = Scenario(2, 3).started(3).commit(5).lose_node(1)
    assert s.acts(act.EndGeneration)[0].workers == (0, 2)
    assert [r.slot for r in s.acts(act.ReleaseSlot)] == [1]
    assert [r.slot for r in s.acts(act.RequestSlot)] == [3], "the lost slot is asked for anew at once"
    s.do(ev.CollectiveFailed(1, 2, 7, "peer closed")).left(7)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (0, 2), "c5", 5)]
    incident = s.train().acts(act.CloseIncident)[0].incident
    assert (incident.kind, incident.lost_workers, incident.lost_nodes) == ("node-lost", (1,), ("node-1",))
    assert (incident.step, incident.resumed_step, incident.steps_repeated) == (7, 5, 2)
    assert list(incident.times) == ["symptom", "detected", "decided", "fenced", "group_ready", "state_ready",
                                    "first_step"]  # fmt: skip


def test_too_few_survivors_wait_for_a_node() -> None:
    s = Scenario(3, 3).started(3).lose_node(1).left(7)
    assert isinstance(s.phase, Waiting)
    assert "wait for 1 more worker" in s.said()
    s.nodes(1)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2, 3)


def test_all_nodes_lost_at_once_starts_anew_when_nodes_come() -> None:
    s = Scenario(2, 2).started(2).commit(5).lose_node(0).lose_node(1)
    assert isinstance(s.phase, Waiting)
    s.nodes(2)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(2, (2, 3), "c5", 5)]


def test_a_dead_worker_is_replaced_in_its_slot_and_comes_back_by_growth() -> None:
    s = Scenario(2, 3).started(3).do(ev.WorkerDied(1, "exit code -9"))
    assert s.acts(act.StartWorker) == [act.StartWorker(3, 1)]
    s.left(4)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)
    s.do(ev.WorkerReady(3, 1, "host")).train()
    assert s.acts(act.ProposeStop)


def test_one_evidence_is_written_down_once() -> None:
    s = Scenario(1, 3).started(3).do(
        ev.CollectiveFailed(1, 0, 7, "peer closed"), ev.CollectiveFailed(1, 0, 7, "peer closed"),
        ev.WorkerDied(1, "exit code -9"), ev.CollectiveFailed(1, 2, 7, "peer closed"),
    )  # fmt: skip
    incident = s.state.trouble.incident
    assert incident is not None
    assert incident.kind == "worker-lost"
    assert len(incident.also) == len(set(incident.also)) == 2


# --- silence ---------------------------------------------------------------------------------------------------------


def test_a_frozen_node_is_probed_and_then_written_off_while_training_goes_on() -> None:
    s = Scenario(2, 3).started(3).do(ev.WorkersSilent((1,), 1.0, ("node-1",)))
    assert s.acts(act.Probe) == [act.Probe((1,))]
    assert isinstance(s.phase, Training)
    s.wait(0.5)
    assert isinstance(s.phase, Ending)
    assert s.left(3).train().acts(act.CloseIncident)[0].incident.kind == "node-frozen"
    s.do(ev.ProbeAnswered(1), ev.WorkerLeft(1, 1, 9), ev.TrainingReached(1, 1, 0), ev.WorkerReady(1, 1, "host"))
    assert not s.last, "the late waker is a stranger"


def test_an_answer_is_an_acquittal_of_the_worker_and_of_its_node() -> None:
    s = Scenario(2, 4, per_slot=2).started(4).do(ev.WorkersSilent((0, 1), 1.0, ("node-0",)), ev.ProbeAnswered(0))
    s.wait(0.5)
    assert [kill.worker for kill in s.acts(act.KillWorker)] == [1]
    assert not s.acts(act.ReleaseSlot)


def test_a_false_alarm_changes_nothing() -> None:
    s = Scenario(2, 3).started(3).do(ev.WorkersSilent((1,), 1.0, ("node-1",)), ev.ProbeAnswered(1)).wait(60)
    assert isinstance(s.phase, Training)
    assert (s.state.trouble.false_alarms, s.state.trouble.incidents) == (1, 0)


def test_every_suspect_has_its_own_time_to_answer() -> None:
    s = Scenario(1, 3).started(3).do(ev.WorkersSilent((1,), 1.0, ("node-1",)), after=0.0)
    s.wait(0.3).do(ev.WorkersSilent((2,), 1.0, ("node-2",)), after=0.0).wait(0.3)
    assert [r.slot for r in s.acts(act.ReleaseSlot)] == [1]
    s.wait(0.2)
    assert [r.slot for r in s.acts(act.ReleaseSlot)] == [2]


def test_silence_while_a_generation_ends_needs_no_second_proof() -> None:
    s = Scenario(2, 3).started(3).do(ev.CollectiveFailed(1, 0, 7, "timeout")).left(7, 0, 2)
    s.do(ev.WorkersSilent((1,), 0.8, ("node-1",)))
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)


def test_no_generation_begins_with_a_silent_worker() -> None:
    s = Scenario(2, 2, gather_s=0).do(ev.RunStarted()).nodes(1).do(ev.WorkersSilent((0,), 1.0, ("node-0",))).nodes(1)
    assert isinstance(s.phase, Waiting)
    assert isinstance(s.do(ev.ProbeAnswered(0)).phase, Joining)


# --- hangs -----------------------------------------------------------------------------------------------------------


def test_who_does_not_leave_a_hanging_generation_is_left_out() -> None:
    s = Scenario(2, 3).started(3).do(ev.ProgressStalled(1, 7, 31.0, 30.0)).left(7, 0, 2)
    assert isinstance(s.phase, Ending)
    s.wait(3)
    assert [kill.worker for kill in s.acts(act.KillWorker)] == [1]
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)
    s.do(ev.WorkerLeft(1, 1, 7))
    assert not s.last


def test_a_generation_that_does_not_get_to_training_in_time_fails() -> None:
    s = Scenario(2, 2, join_timeout_s=60).do(ev.RunStarted()).nodes(2).do(ev.TrainingReached(1, 0, 0)).wait(60)
    assert isinstance(s.phase, Ending)
    assert "not training, and no progress for 60 s: rank 1 on node node-1" in s.said()


def test_two_failures_in_the_same_processes_without_a_loss_bring_fresh_processes() -> None:
    s = Scenario(2, 2).started(2).broken(0).join().broken(1)
    assert "every worker process is replaced" in s.said()
    assert {kill.worker for kill in s.acts(act.KillWorker)} == {0, 1}


def test_an_older_loss_in_the_same_incident_does_not_hide_that_the_processes_are_bad() -> None:
    s = Scenario(2, 3).started(3).lose_node(2).left(3).join().broken(0).wait(1).join().broken(0)
    assert "every worker process is replaced" in s.said()


# --- user code -------------------------------------------------------------------------------------------------------


def test_a_user_error_ends_the_run_even_when_the_collective_errors_come_first() -> None:
    s = Scenario(2, 3).started(3).do(ev.CollectiveFailed(1, 0, 7, "peer closed"), ev.CollectiveFailed(1, 2, 7, "same"))
    s.do(ev.UserCodeFailed(1, 1, 7, "KeyError: 'x'", "Traceback ..."))
    assert [note.data["traceback"] for note in s.acts(act.Note) if note.kind == "user-error"] == ["Traceback ..."]
    status, reason = s.left(7).end
    assert status == "user-code-failed"
    assert "rank 1 on node node-1, step 7: KeyError: 'x'" in reason


def test_a_user_error_that_a_lost_node_explains_does_not_end_the_run() -> None:
    for first, second in ((0, 1), (1, 0)):
        s = Scenario(2, 3).started(3)
        events = [ev.SlotLost(2, "the raylet is gone"), ev.UserCodeFailed(1, 0, 7, "MyError: peer lost")]
        s.do(events[first], events[second]).left(7)
        assert isinstance(s.phase, Joining)


def test_a_process_that_ends_after_its_function_raised_is_still_a_user_error() -> None:
    s = Scenario(2, 2).started(2).do(ev.UserCodeFailed(1, 1, 7, "KeyError"), ev.WorkerDied(1, "exit code 1"))
    assert s.left(7).end[0] == "user-code-failed"


def test_user_errors_have_their_own_budget_which_progress_renews() -> None:
    s = Scenario(1, 1, user_error_retries=1).started(1)
    for step in (5, 6, 7):
        s.do(ev.UserCodeFailed(s.state.generation, 0, step, "flaky")).left(step)
        assert isinstance(s.phase, Joining), "each time it got further than before"
        s.train()
    s.do(ev.UserCodeFailed(s.state.generation, 0, 7, "flaky")).left(7)
    assert s.end[0] == "user-code-failed"
    assert "2 times in a row" in s.end[1]


def test_a_user_error_does_not_make_the_next_lost_node_one() -> None:
    s = Scenario(1, 3, user_error_retries=1).started(3).do(ev.UserCodeFailed(1, 1, 7, "flaky")).left(7)
    s.lose_node(2).left(0).wait(1)
    assert isinstance(s.phase, Joining)
    assert s.state.trouble.streaks.user_errors == 1


def test_bad_configuration_ends_the_run_at_once() -> None:
    s = Scenario(1, 1, user_error_retries=5).started(1).do(ev.UserCodeFailed(1, 0, 0, "no such key", usage=True))
    assert s.left(0).end == ("usage", "no such key")


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_bad_checkpoints_are_passed_over_one_by_one_and_then_the_run_ends() -> None:
    s = Scenario(1, 1, crash_streak=0).do(ev.RunStarted((("c9", 9), ("c5", 5)), 2)).nodes(1)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(3, (0,), "c9", 9)]
    s.do(ev.RestoreFailed(3, 0, "c9", "content check failed"))
    assert "falling back to c5 (step 5)" in s.said()
    s.left(9)
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(4, (0,), "c5", 5)]
    s.do(ev.RestoreFailed(4, 0, "c5", "a shard is missing")).left(5)
    assert s.end[0] == "integrity"
    assert "c5" in s.end[1]


def test_a_run_whose_checkpoints_were_all_refused_does_not_begin_anew_in_silence() -> None:
    s = Scenario(1, 3, user_error_retries=3).do(ev.RunStarted((("c9", 9),))).nodes(3)
    s.do(ev.RestoreFailed(1, 0, "c9", "content check failed"), ev.UserCodeFailed(1, 1, 9, "odd")).left(9)
    assert s.end[0] == "integrity"


def test_a_crash_loop_that_began_with_a_bad_checkpoint_is_still_counted() -> None:
    s = Scenario(1, 1, crash_streak=2).do(ev.RunStarted((("c9", 9), ("c5", 5)))).nodes(1)
    s.do(ev.RestoreFailed(1, 0, "c9", "bad")).left(9)
    for _ in range(3):
        assert isinstance(s.phase, Joining)
        s.broken(0, step=5).wait(30)
        s.do(*(ev.WorkerReady(w, 1, "host") for w in s.state.fleet.workers))
    assert s.end[0] == "gave-up"


def test_a_restore_that_fails_on_a_checkpoint_nobody_asked_for_is_a_crash() -> None:
    s = Scenario(1, 1, crash_streak=0).do(ev.RunStarted((("c9", 9),))).nodes(1)
    s.do(ev.RestoreFailed(1, 0, "other", "bad")).left(9)
    assert s.end[0] == "gave-up"


# --- budgets ---------------------------------------------------------------------------------------------------------


def crash_until_end(s: Scenario, limit: int = 50) -> int:
    for count in range(1, limit):
        s.do(ev.WorkerDied(s.state.members[0], "exit code -9"))
        s.do(*(ev.WorkerReady(w, 1, "host") for w in s.state.fleet.workers))
        if s.state.phase.__class__.__name__ == "Finished":
            return count
        s.wait(60)
    return limit


def test_a_crash_loop_without_progress_gives_up() -> None:
    s = Scenario(1, 1, crash_streak=5).started(1)
    assert crash_until_end(s) == 6
    assert s.end[0] == "gave-up"
    assert "6 generations in a row failed without a new step or checkpoint" in s.end[1]


@pytest.mark.parametrize("progress", ["step", "checkpoint"])
def test_progress_renews_the_budget(progress: str) -> None:
    s = Scenario(1, 1, crash_streak=2).started(1)
    for step in range(2, 12):
        if progress == "step":
            s.do(ev.CollectiveFailed(s.state.generation, s.state.members[0], step, "broken")).left(step)
        else:
            s.commit(step).do(ev.CollectiveFailed(s.state.generation, s.state.members[0], 0, "broken")).left(step)
        s.do(*(ev.WorkerReady(w, 1, "host") for w in s.state.fleet.workers))
        s.join()
    assert isinstance(s.phase, Training)
    assert s.state.trouble.streaks.crashes == 1


def test_a_bad_checkpoint_that_is_written_again_and_again_is_no_progress() -> None:
    s = Scenario(1, 1, crash_streak=3).do(ev.RunStarted((("c1", 1),))).nodes(1)
    for _ in range(20):
        if not isinstance(s.phase, Joining):
            break
        number = s.state.generation
        s.join().do(ev.CheckpointCommitted(f"c10-{number}", 10, number))
        s.do(ev.CollectiveFailed(number, s.state.members[0], 13, "broken")).left(13).wait(60)
        s.do(*(ev.WorkerReady(worker, 1, "host") for worker in s.state.fleet.workers))
        if isinstance(s.phase, Joining):
            s.do(ev.RestoreFailed(s.state.generation, s.state.members[0], f"c10-{number}", "bad")).left(13).wait(60)
    assert s.end[0] == "gave-up"


def test_failed_attempts_pause_longer_and_longer() -> None:
    s = Scenario(1, 1, crash_streak=20, retry_backoff_s=1.0, retry_backoff_limit_s=8.0).started(1)
    pauses = []
    for _ in range(7):
        s.broken(s.state.members[0], step=1)
        s.do(*(ev.WorkerReady(w, 1, "host") for w in s.state.fleet.workers))
        began = s.now
        while not isinstance(s.phase, Joining):
            s.wait(0.25)
        pauses.append(round(s.now - began))
    assert pauses == [0, 1, 2, 4, 8, 8, 8]


def test_a_burst_of_lost_nodes_is_no_crash_loop() -> None:
    s = Scenario(1, 8, crash_streak=2).started(8)
    for worker in range(7):
        s.lose_node(worker).left(1).wait(30)
    assert isinstance(s.phase, Joining)
    assert s.state.members == (7,)


def test_a_job_that_kills_every_node_it_gets_gives_up() -> None:
    s = Scenario(1, 1, crash_streak=2).started(1)
    for _ in range(4):
        s.lose_node(s.state.members[0]).wait(30).nodes(1)
    assert s.end[0] == "gave-up"


def test_a_second_failure_belongs_to_the_same_incident_until_a_step_is_done() -> None:
    s = Scenario(1, 3).started(3).lose_node(2).left(1).do(ev.WorkerDied(1, "exit code -9")).left(1).wait(1)
    incident = s.train().acts(act.CloseIncident)[0].incident
    assert (incident.id, s.state.trouble.incidents) == (1, 1)
    assert (incident.kind, incident.lost_workers) == ("node-lost", (2, 1))
    assert (incident.world_size, incident.next_world_size) == (3, 1)
