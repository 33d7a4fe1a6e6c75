"""Nodes that are about to go away: left at a step boundary, before their time is up, and replaced where possible."""

from __future__ import annotations

from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.run.phase import Ending, Joining, Pausing, Training, Waiting
from elastic.core.run.state import SlotPhase


def drained(s: Scenario, *nodes: str, in_s: float = 60.0) -> Scenario:
    return s.do(ev.NodesDraining(tuple((node, s.now + in_s if in_s else 0.0) for node in nodes)))


def test_a_slot_elsewhere_is_asked_for_at_once_and_training_goes_on() -> None:
    s = drained(Scenario(2, 3).started(3), "node-1")
    assert isinstance(s.phase, Training)
    assert [action.slot for action in s.acts(act.RequestSlot)] == [3]
    assert "node-1 is going away in 60 s" in s.said()


def test_where_no_replacement_comes_the_others_go_on_without_it_and_its_slot_is_given_back_once_they_train() -> None:
    s = drained(Scenario(2, 3, gather_s=5.0).started(3), "node-1").wait(4.9)
    assert isinstance(s.phase, Training)
    s.wait(0.2)
    assert isinstance(s.phase, Pausing)
    s.do(*(ev.StopPromised(1, worker, 7) for worker in (0, 1, 2))).left(7).commit(7)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)
    assert not s.acts(act.ReleaseSlot), "its memory may hold what the others need"
    s.train()
    assert [action.slot for action in s.acts(act.ReleaseSlot)] == [1]
    incident = s.acts(act.CloseIncident)[0].incident
    assert (incident.planned, incident.steps_repeated, incident.lost_nodes) == (True, 0, ())
    assert "node-1" not in s.state.fleet.quarantine, "to be drained is no fault"


def test_a_replacement_that_is_starting_is_waited_for_so_that_the_world_size_stays() -> None:
    s = drained(Scenario(2, 3).started(3), "node-1")
    s.do(ev.SlotPlaced(3, "node-3")).wait(20.0)
    assert isinstance(s.phase, Training)
    s.do(ev.WorkerReady(3, 103, "host"))
    assert isinstance(s.phase, Pausing)
    s.do(*(ev.StopPromised(1, worker, 7) for worker in (0, 1, 2))).left(7).commit(7)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2, 3)


def test_a_replacement_is_not_waited_for_longer_than_there_is_time() -> None:
    s = drained(Scenario(2, 3, drain_margin_s=10.0).started(3), "node-1", in_s=30.0)
    s.do(ev.SlotPlaced(3, "node-3")).wait(19.0)
    assert isinstance(s.phase, Training)
    s.wait(2.0)
    assert isinstance(s.phase, Pausing)


def test_a_spare_takes_over_at_once() -> None:
    s = Scenario(2, 3).started(3)
    # A fourth worker, as a run with a spare slot has one.
    s = drained(s, "node-2").nodes(1)
    assert isinstance(s.phase, Pausing)


def test_a_node_that_the_run_cannot_do_without_is_trained_on_until_shortly_before_its_end() -> None:
    s = drained(Scenario(2, 2, memory=True, drain_margin_s=10.0).started(2), "node-1", in_s=60.0).wait(49.0)
    assert isinstance(s.phase, Training)
    s.wait(2.0)
    assert isinstance(s.phase, Pausing)
    assert s.phase.durable, "its memory goes with it, and perhaps all others"
    s.do(ev.StopPromised(1, 0, 7, True), ev.StopPromised(1, 1, 7, True)).left(7)
    assert isinstance(s.phase, Pausing)
    s.commit(7)
    assert isinstance(s.phase, Waiting)
    assert [action.slot for action in s.acts(act.ReleaseSlot)] == [1], "Ray ends a node when nothing is there"
    (before, after) = [action.survey for action in s.acts(act.QuerySnapshots)]
    s.do(ev.SnapshotsReported(before, (("memory:step-00000007-g0001", 7),)))
    assert s.state.saved.snapshots == (), "that was counted on what has been given back"
    s.do(ev.SnapshotsReported(after)).wait(5.0)
    assert isinstance(s.phase, Waiting), "it is not begun with again"
    s.nodes(1)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)


def test_without_a_deadline_it_is_trained_on_for_as_long_as_it_takes() -> None:
    s = drained(Scenario(2, 2).started(2), "node-1", in_s=0.0).wait(10_000.0)
    assert isinstance(s.phase, Training)
    assert isinstance(s.nodes(1).phase, Pausing)


def test_a_notice_that_is_shorter_than_the_margin_is_acted_upon_at_once() -> None:
    s = drained(Scenario(2, 3, drain_margin_s=10.0).started(3), "node-1", in_s=3.0).wait(0.1)
    assert isinstance(s.phase, Pausing)


def test_a_node_that_goes_before_the_others_are_ready_to_leave_it_is_a_lost_node() -> None:
    s = drained(Scenario(2, 3).started(3), "node-1", in_s=3.0).wait(0.1)
    assert isinstance(s.phase, Pausing)
    s.lose_node(1)
    assert isinstance(s.phase, Ending)
    s.left(5)
    assert s.acts(act.BeginGeneration)[0].members == (0, 2)


def test_a_lost_node_meanwhile_makes_one_that_is_going_welcome_until_its_time() -> None:
    s = drained(Scenario(2, 3, memory=True).started(3), "node-1").wait(5.1)
    assert isinstance(s.phase, Pausing)
    s.lose_node(0).left(5)
    s.do(ev.SnapshotsReported(s.state.saved.surveys))
    assert isinstance(s.phase, Joining)
    assert s.state.members == (1, 2)


def test_nothing_begins_on_a_node_that_is_going_where_there_are_others() -> None:
    s = Scenario(1, 3).do(ev.RunStarted(), ev.NodesDraining((("node-0", 1e9),))).nodes(3).wait(5.0)
    assert {s.state.fleet.node_of(worker) for worker in s.state.members} == {"node-1", "node-2"}
    assert all(slot.node != "node-0" for slot in s.state.fleet.slots.values()), "a slot there is given back"


def test_a_node_that_stays_after_all_costs_no_slot_too_many() -> None:
    s = drained(Scenario(2, 3).started(3), "node-1")
    assert len(s.state.fleet.slots) == 4
    s.do(ev.NodesDraining(()))
    assert [action.slot for action in s.acts(act.ReleaseSlot)] == [3]
    assert [slot.phase for slot in s.state.fleet.slots.values()] == [SlotPhase.PLACED] * 3
    assert isinstance(s.wait(100.0).phase, Training)


def test_all_nodes_at_once_end_in_storage() -> None:
    s = drained(Scenario(1, 2, memory=True).started(2), "node-0", "node-1", in_s=30.0).wait(21.0)
    assert isinstance(s.phase, Pausing)
    assert s.phase.durable
    s.do(ev.StopPromised(1, 0, 7, True), ev.StopPromised(1, 1, 7, True)).left(7).commit(7)
    assert isinstance(s.phase, Waiting)
    assert len([slot for slot in s.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]) == 2
