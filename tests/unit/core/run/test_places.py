"""What a worker that has not joined yet is told of its place."""

from __future__ import annotations

from dataclasses import replace

from machine_scenario import Scenario

from elastic.core import events as ev
from elastic.core.run.membership import expected_place


def _newcomers(scenario: Scenario) -> list[int]:
    return [worker for worker in scenario.state.fleet.workers if worker not in scenario.state.members]


def test_those_who_come_are_counted_on_from_the_members() -> None:
    s = Scenario(1, 4).started(2)
    slots = sorted(slot.id for slot in s.state.fleet.slots.values() if slot.node is None)
    s.do(ev.SlotPlaced(slots[0], "c"))
    (third,) = _newcomers(s)
    assert expected_place(s.state, third) == (2, 3)
    s.do(ev.SlotPlaced(slots[1], "d"))
    assert [expected_place(s.state, worker) for worker in _newcomers(s)] == [(2, 4), (3, 4)]
    assert expected_place(s.state, s.state.members[0]) is None
    assert expected_place(s.state, 99) is None


def test_nobody_is_told_before_the_first_generation() -> None:
    s = Scenario(2, 2).do(ev.RunStarted(), ev.SlotPlaced(0, "a"))
    assert expected_place(s.state, next(iter(s.state.fleet.workers))) is None


def test_one_that_stands_by_takes_a_place_that_is_left() -> None:
    s = Scenario(1, 3).started(2)
    s.do(ev.SlotPlaced(next(slot.id for slot in s.state.fleet.slots.values() if slot.node is None), "c"))
    (third,) = _newcomers(s)
    told = []
    for most in (3, 2, 1):
        fewer = replace(s.state.settings, scaling=replace(s.state.settings.scaling, max_workers=most))
        told.append(expected_place(replace(s.state, settings=fewer), third))
    assert told == [(2, 3), (1, 2), None]


def test_places_in_cells_follow_the_slots() -> None:
    s = Scenario(2, 6, cell=2).started(2)
    free = iter(sorted(slot.id for slot in s.state.fleet.slots.values() if slot.node is None))
    s.do(ev.SlotPlaced(next(free), "c"))
    assert [expected_place(s.state, worker) for worker in _newcomers(s)] == [None], "no whole cell"
    s.do(ev.SlotPlaced(next(free), "d"))
    assert [expected_place(s.state, worker) for worker in _newcomers(s)] == [(2, 4), (3, 4)]


def test_a_new_process_in_an_old_slot_of_a_cell_has_a_place_in_the_middle() -> None:
    s = Scenario(2, 4, cell=2).started(4).do(ev.WorkerDied(1, "killed")).left(3).train()
    assert s.state.members == (0, 2), "a whole cell"
    assert [expected_place(s.state, worker) for worker in _newcomers(s)] == [(3, 4), (1, 4)]
