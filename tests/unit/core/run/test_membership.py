"""Slots and workers: how they come, how they fail to come, and how much of the run that may cost."""

from __future__ import annotations

from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.run import machine
from elastic.core.run.phase import Ending, Joining, Training, Waiting
from elastic.core.run.state import SlotPhase, WorkerPhase


def test_a_first_start_waits_for_nodes_that_arrive_together() -> None:
    s = Scenario(2, 3, gather_s=5).do(ev.RunStarted()).nodes(2)
    assert isinstance(s.phase, Waiting)
    s.wait(4.9)
    assert isinstance(s.phase, Waiting)
    assert s.wait(0.1).acts(act.BeginGeneration)[0].members == (0, 1)


def test_all_that_are_wanted_need_no_wait() -> None:
    assert isinstance(Scenario(2, 3).do(ev.RunStarted()).nodes(3).phase, Joining)


def test_too_little_capacity_for_too_long_ends_the_run() -> None:
    s = Scenario(2, 3, capacity_timeout_s=30).do(ev.RunStarted()).nodes(1).wait(30)
    assert s.end[0] == "no-capacity"
    assert "1 of at least 2 ready" in s.end[1]


def test_without_a_limit_the_run_waits_and_says_for_what() -> None:
    s = Scenario(2, 3).do(ev.RunStarted()).nodes(1).wait(10**6)
    assert isinstance(s.phase, Waiting)
    assert s.phase.reason == "waiting for 1 more worker: 1 of at least 2 ready, 0 starting, 2 slots pending"
    assert machine.next_deadline(s.state) is None


def test_a_wait_for_capacity_does_not_spin_the_clock() -> None:
    s = Scenario(2, 3, capacity_timeout_s=30, gather_s=2).do(ev.RunStarted(), ev.SlotPlaced(0, "node-0")).wait(29)
    ticks = [event for event, _ in s.journal if isinstance(event, ev.Tick)]
    assert len(ticks) <= 2


def test_ranks_of_one_node_are_neighbours() -> None:
    s = Scenario(4, 4, per_slot=2).do(ev.RunStarted(), ev.SlotPlaced(1, "b"), ev.SlotPlaced(0, "a"))
    s.do(*(ev.WorkerReady(worker, 1, "host") for worker in (3, 1, 0, 2)))
    members = s.acts(act.BeginGeneration)[0].members
    assert [s.state.fleet.node_of(worker) for worker in members] == ["a", "a", "b", "b"]


def test_rank_0_begins_on_a_node_that_is_likely_to_last_and_stays_there() -> None:
    s = Scenario(2, 3).do(ev.RunStarted(), *(ev.SlotPlaced(slot, f"node-{slot}") for slot in range(3)))
    ready = [ev.WorkerReady(worker, 1, "host", lasting) for worker, lasting in enumerate((-1, 1, 2))]
    assert s.do(*ready).acts(act.BeginGeneration)[0].members == (2, 1, 0)
    s.train().lose_node(0)
    s.left(1, 2).nodes(1).train().wait(60)
    assert s.state.members[0] == 2


def test_a_node_of_two_is_lost_with_both() -> None:
    s = Scenario(2, 4, per_slot=2).started(4).lose_node(0)
    assert s.acts(act.EndGeneration)[0].workers == (2, 3)
    assert s.left(3).acts(act.BeginGeneration)[0].members == (2, 3)


def test_a_minimum_that_does_not_fill_its_nodes() -> None:
    s = Scenario(3, 4, per_slot=2).do(ev.RunStarted()).nodes(1).wait(5)
    assert isinstance(s.phase, Waiting)
    s.do(ev.SlotPlaced(1, "b"), ev.WorkerReady(2, 1, "host"))
    assert isinstance(s.phase, Waiting), "the fourth is about to come"
    s.do(ev.WorkerReady(3, 1, "host"))
    assert len(s.acts(act.BeginGeneration)[0].members) == 4


def test_a_worker_that_makes_progress_in_its_set_up_has_as_long_again() -> None:
    s = Scenario(2, 4, worker_start_timeout_s=100.0).started(2).do(ev.SlotPlaced(2, "c"), ev.SlotPlaced(3, "d"))
    first, second = s.state.fleet.workers.starting
    s.wait(60).do(ev.WorkerSettingUp(first))
    assert f"worker {first} on node c is in its set-up, 60 s after its start, and makes progress" in s.said()
    assert [*s.state.fleet.workers.starting] == [second, first], "whose time ends first is looked at first"
    s.wait(45)
    assert "not ready after 100 s" in s.said()
    assert first in s.state.fleet.workers
    assert second not in s.state.fleet.workers
    s.do(ev.WorkerReady(first, 1, "host"))
    assert f"worker {first} on node c is ready after 105.0 s" in s.said()


def test_a_worker_that_is_ready_has_its_set_up_behind_it() -> None:
    s = Scenario(2, 4).started(2)
    before = s.state
    assert s.do(ev.WorkerSettingUp(0), ev.WorkerSettingUp(77)).state.fleet == before.fleet


def test_one_of_two_workers_of_a_node_dies_and_comes_back() -> None:
    s = Scenario(2, 4, per_slot=2).started(4).do(ev.WorkerDied(1, "exit code -9")).left(3)
    assert s.state.members == (0, 2, 3)
    s.train().do(ev.WorkerReady(4, 1, "host"))
    assert s.acts(act.ProposeStop)


# --- workers that do not start ---------------------------------------------------------------------------------------


def fail_starts(s: Scenario, count: int) -> None:
    """Whatever starts fails, `count` times; slots get nodes as soon as they are asked for."""
    done = 0
    while done < count:
        starting = [w.id for w in s.state.fleet.workers.values() if w.phase is WorkerPhase.STARTING]
        pending = [slot.id for slot in s.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
        if starting:
            s.do(ev.WorkerStartFailed(starting[0], "import error"))
            done += 1
        elif pending:
            s.do(ev.SlotPlaced(pending[0], f"node-{pending[0]}"))
        elif s.state.fleet.slots_not_before:
            s.wait(s.state.fleet.slots_not_before - s.now + 0.001)
        else:
            return


def test_a_failed_start_is_tried_again_in_the_slot_and_then_elsewhere() -> None:
    s = Scenario(1, 1, startup_retries=2).do(ev.RunStarted(), ev.SlotPlaced(0, "lemon"))
    for worker in (0, 1):
        s.do(ev.WorkerStartFailed(worker, "no memory"))
        assert s.acts(act.StartWorker) == [act.StartWorker(worker + 1, 0)]
    s.do(ev.WorkerStartFailed(2, "no memory"))
    assert [r.slot for r in s.acts(act.ReleaseSlot)] == [0]
    assert not s.acts(act.RequestSlot), "not at once: one bad node must not keep the run busy"
    assert [r.slot for r in s.wait(0.5).acts(act.RequestSlot)] == [1]


def test_starts_that_always_fail_end_a_run_that_cannot_begin() -> None:
    s = Scenario(1, 1, startup_retries=2).do(ev.RunStarted())
    fail_starts(s, 100)
    assert s.end[0] == "gave-up"
    assert "5 worker processes in a row could not be started" in s.end[1]


def test_a_bad_entry_point_ends_the_run_at_once() -> None:
    s = Scenario(1, 1).do(ev.RunStarted(), ev.SlotPlaced(0, "a"), ev.WorkerStartFailed(0, "no module x", usage=True))
    assert s.end == ("usage", "no module x")


def test_a_worker_that_is_not_ready_in_time_counts_as_a_failed_start() -> None:
    s = Scenario(1, 1, worker_start_timeout_s=20).do(ev.RunStarted(), ev.SlotPlaced(0, "a")).wait(20)
    assert s.acts(act.StartWorker) == [act.StartWorker(1, 0)]
    s.do(ev.WorkerReady(0, 1, "host"))
    assert isinstance(s.phase, Waiting), "worker 0 was written off"


def test_a_bad_node_beside_a_healthy_run_costs_the_run_nothing() -> None:
    s = Scenario(2, 3, startup_retries=1).started(2)
    fail_starts(s, 60)
    assert isinstance(s.phase, Training)
    assert s.state.world_size == 2


def test_a_bad_node_is_asked_less_and_less() -> None:
    s = Scenario(2, 3, startup_retries=1, retry_backoff_s=1.0, retry_backoff_limit_s=30.0).started(2)
    began = s.now
    fail_starts(s, 24)
    assert s.now - began > 200


def test_failed_starts_from_better_days_do_not_count_against_a_later_wait() -> None:
    s = Scenario(2, 3, startup_retries=1).started(2)
    fail_starts(s, 40)
    s.lose_node(0).left(1)
    assert isinstance(s.phase, Waiting)
    fail_starts(s, 1)
    assert isinstance(s.phase, Waiting)


def test_a_slot_whose_second_worker_cannot_start_is_not_taken_from_the_first() -> None:
    s = Scenario(1, 2, per_slot=2, startup_retries=1, gather_s=0).do(ev.RunStarted()).nodes(1).train()
    s.do(ev.WorkerDied(1, "exit code -9")).left(1, 0).train()
    s.do(ev.WorkerStartFailed(2, "no memory"), ev.WorkerStartFailed(3, "no memory"))
    assert not s.acts(act.ReleaseSlot)
    assert isinstance(s.phase, Training)
    s.do(ev.CollectiveFailed(2, 0, 5, "broken")).left(5)
    assert [r.slot for r in s.acts(act.ReleaseSlot)] == [0], "now nobody needs it any more"
    assert isinstance(s.phase, Waiting)


def test_a_worker_that_was_given_up_is_tried_again_when_its_neighbour_starts() -> None:
    s = Scenario(1, 3, per_slot=3, startup_retries=0).started(3)
    s.do(ev.WorkerDied(1, "exit code -9"), ev.WorkerDied(2, "exit code -9")).left(1, 0).train()
    s.do(ev.WorkerStartFailed(3, "no memory"))
    assert not s.acts(act.StartWorker)
    s.do(ev.WorkerReady(4, 1, "host"))
    assert s.acts(act.StartWorker) == [act.StartWorker(5, 0)]


# --- slots that do not come ------------------------------------------------------------------------------------------


def test_slots_that_are_lost_before_they_are_placed_are_not_asked_for_in_a_loop() -> None:
    s = Scenario(1, 1, retry_backoff_s=1.0, retry_backoff_limit_s=30.0).do(ev.RunStarted())
    for count in range(20):
        assert list(s.state.fleet.slots) == [count]
        s.do(ev.SlotLost(count, "the group could not be created")).wait(30)
    assert s.now > 1500


def test_the_pause_ends_with_the_first_worker() -> None:
    s = Scenario(1, 2).do(ev.RunStarted(), ev.SlotLost(0, "no group"), ev.SlotPlaced(1, "a"), ev.WorkerReady(0, 1, "h"))
    assert s.state.trouble.streaks.slot_failures == 0


def test_an_idle_worker_that_dies_is_replaced_and_nothing_else_happens() -> None:
    s = Scenario(2, 3, gather_s=0).do(ev.RunStarted()).nodes(1).do(ev.WorkerDied(0, "exit code -9"))
    assert s.acts(act.StartWorker) == [act.StartWorker(1, 0)]
    assert s.state.trouble.incident is None


def test_the_unknown_and_the_repeated_change_nothing() -> None:
    s = Scenario(2, 3).started(3)
    before = s.state
    s.do(
        ev.SlotPlaced(0, "elsewhere"), ev.SlotPlaced(77, "x"), ev.SlotLost(77, "x"), ev.WorkerReady(0, 5, "h"),
        ev.WorkerReady(77, 5, "h"), ev.WorkerStartFailed(0, "late"), ev.WorkerDied(77, "x"), ev.ProbeAnswered(0),
        ev.WorkersSilent((77,), 1.0), ev.FirstStepDone(1, 1), ev.TrainingReached(1, 0, 0), ev.RunStarted((("z", 99),)),
    )  # fmt: skip
    assert s.state == before
    assert not s.last


def test_losses_in_every_stage_of_an_end() -> None:
    s = Scenario(1, 3).started(3).lose_node(0)
    assert isinstance(s.phase, Ending)
    s.lose_node(1)
    assert isinstance(s.phase, Ending)
    s.do(ev.WorkerDied(2, "exit code -9"))
    assert isinstance(s.phase, Waiting)
    assert s.state.trouble.incident is not None
    assert s.state.trouble.incident.lost_workers == (0, 1, 2)


def acquitted(s: Scenario, times: int, pause_s: float = 1.0) -> Scenario:
    """The agent of worker 0's node is silent again and again, and the worker answers its probe."""
    node = s.state.fleet.node_of(0)
    assert node is not None
    for _ in range(times):
        s.do(ev.WorkersSilent((0,), 1.1, (node,)), after=pause_s).do(ev.ProbeAnswered(0))
    return s


def test_a_node_whose_agent_stands_still_is_lost_although_its_worker_answers() -> None:
    s = acquitted(Scenario(1, 2, silent_agent_limit=4).started(2), 3)
    assert isinstance(s.phase, Training)
    assert s.state.trouble.false_alarms == 3
    acquitted(s, 1)
    assert isinstance(s.phase, Ending)
    assert "was silent 4 times in a row, although its workers answer (rank 0)" in s.said()
    assert [release.slot for release in s.acts(act.ReleaseSlot)] == [0]
    incident = s.state.trouble.incident
    assert incident is not None
    assert incident.kind == "node-frozen"
    assert s.state.trouble.suspicion is None
    assert isinstance(s.left(5, 1).phase, Joining), "the other one continues"


def test_an_agent_that_was_heard_in_between_is_not_counted_on() -> None:
    s = acquitted(Scenario(1, 2, silent_agent_limit=4).started(2), 20, pause_s=10.0)
    assert isinstance(s.phase, Training)


def test_a_worker_that_is_silent_alone_does_not_count_against_its_agent() -> None:
    s = Scenario(1, 2, silent_agent_limit=2).started(2)
    for _ in range(9):
        s.do(ev.WorkersSilent((0,), 1.1), after=1.0).do(ev.ProbeAnswered(0))
    assert isinstance(s.phase, Training)
