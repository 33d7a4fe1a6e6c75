"""What a run makes of what the cluster lacks, and of what other runs need."""

from __future__ import annotations

from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.run.phase import Finished, Joining, Pausing, Training, Waiting
from elastic.core.run.state import SlotPhase

WHY = "run b of priority 1 (this one: 0) waits for 2 slots"


def shared(s: Scenario, limit: int | None) -> Scenario:
    return s.do(ev.SlotsShared(limit, WHY if limit is not None else ""))


def released(s: Scenario) -> list[int]:
    return [action.slot for action in s.acts(act.ReleaseSlot)]


# --- capacity ---


def test_what_can_never_be_had_ends_a_run_that_has_not_begun() -> None:
    s = Scenario(2, 3).do(ev.RunStarted(), ev.CapacityJudged("a worker wants GPU: 8, which no node has", never=True))
    assert s.end == ("no-capacity", "a worker wants GPU: 8, which no node has")
    assert released(s) == [0, 1, 2], "nothing is left half-started"


def test_what_is_short_is_said_while_it_is_waited_for() -> None:
    s = Scenario(2, 3).do(ev.RunStarted(), ev.CapacityJudged("1 short"))
    assert isinstance(s.phase, Waiting)
    assert s.phase.reason.endswith("; 1 short")
    s.do(ev.CapacityJudged(""))
    assert isinstance(s.phase, Waiting)
    assert "1 short" not in s.phase.reason


def test_a_run_that_has_begun_waits_for_its_nodes_to_come_back() -> None:
    s = Scenario(2, 2).started(2).lose_node(0).left(1)
    s.do(ev.CapacityJudged("a worker wants CPU: 1, and there is no node", never=True))
    assert isinstance(s.phase, Waiting), "its nodes may come back"


def test_the_time_limit_says_what_was_short() -> None:
    s = Scenario(2, 3, capacity_timeout_s=30.0).do(ev.RunStarted(), ev.CapacityJudged("1 short"))
    assert s.wait(31.0).end[0] == "no-capacity"
    assert s.end[1].endswith("; 1 short")


# --- sharing ---


def test_slots_are_given_back_once_the_others_train_and_no_step_is_lost() -> None:
    s = shared(Scenario(1, 3).started(3), 1)
    assert isinstance(s.phase, Pausing)
    assert f"{WHY}: 3 -> 1" in s.said()
    s.do(*(ev.StopPromised(1, worker, 7) for worker in (0, 1, 2))).left(7).commit(7)
    assert s.acts(act.BeginGeneration)[0].members == (0,)
    assert not released(s), "their memory may hold what the others need"
    s.train()
    assert sorted(released(s)) == [1, 2]
    incident = s.acts(act.CloseIncident)[0].incident
    assert (incident.planned, incident.steps_repeated) == (True, 0)
    assert not s.state.fleet.quarantine, "it is no fault of the nodes"
    assert not s.acts(act.RequestSlot), "what others wait for is not asked for"
    assert not s.wait(60.0).acts(act.RequestSlot)


def test_when_nobody_needs_them_any_more_it_asks_again() -> None:
    s = shared(Scenario(1, 3).started(3), 1)
    s.do(*(ev.StopPromised(1, worker, 7) for worker in (0, 1, 2))).left(7).commit(7).train()
    assert len(shared(s, None).acts(act.RequestSlot)) == 2


def test_what_has_no_place_yet_is_withdrawn_first() -> None:
    s = shared(Scenario(1, 4).started(2), 2)
    assert (released(s), type(s.phase)) == ([2, 3], Training)


def test_nothing_that_trains_is_stopped_whatever_is_asked() -> None:
    s = shared(Scenario(2, 3).started(3), 0)
    s.do(*(ev.StopPromised(1, worker, 7) for worker in (0, 1, 2))).left(7).commit(7)
    assert s.acts(act.BeginGeneration)[0].members == (0, 1)


def test_a_run_that_cannot_begin_lets_go_of_what_it_holds_and_says_why() -> None:
    s = Scenario(3, 3).do(ev.RunStarted()).nodes(2)
    shared(s, 0)
    assert (sorted(released(s)), s.state.fleet.slots) == ([0, 1, 2], {})
    assert isinstance(s.phase, Waiting)
    assert f"requesting at most 0 slots: {WHY}" in s.phase.reason
    assert len(shared(s, None).acts(act.RequestSlot)) == 3


def test_a_limit_that_is_lifted_before_the_slots_were_given_back_leaves_them_where_they_are() -> None:
    s = shared(Scenario(1, 3).started(3), 1)
    s.do(*(ev.StopPromised(1, worker, 7) for worker in (0, 1, 2)))
    shared(s, None)
    s.left(7).commit(7)
    assert isinstance(s.phase, Joining)
    assert s.acts(act.BeginGeneration)[0].members == (0, 1, 2)


def test_between_generations_places_are_kept_as_their_memory_is_what_comes_next() -> None:
    s = Scenario(1, 3).started(3).broken(0)
    shared(s, 1)
    assert not released(s)
    s.train()
    assert isinstance(s.phase, Pausing)


def test_a_run_that_is_stopped_asks_for_nothing_from_that_moment() -> None:
    s = Scenario(1, 3).started(1).do(ev.StopRequested("enough"))
    assert isinstance(s.phase, Pausing)
    assert released(s) == [1, 2]


def test_the_end_of_a_run_leaves_no_slot_asked_for() -> None:
    s = Scenario(1, 3).started(1)
    assert sum(slot.phase is SlotPhase.PENDING for slot in s.state.fleet.slots.values()) == 2
    assert released(s.completed(9)) == [1, 2], "while the last checkpoint is awaited"
    assert released(s.commit(9)) == [0]
    assert isinstance(s.phase, Finished)
