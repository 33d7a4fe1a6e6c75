"""Ray's control store goes away: training continues, nobody is late with what needs it, and the journal says so."""

from __future__ import annotations

from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.run import machine
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.state import SlotPhase, WorkerPhase


def _sentences(scenario: Scenario) -> list[str]:
    return [action.sentence for action in scenario.last if isinstance(action, act.Note)]


def test_training_goes_on_and_it_is_said_once() -> None:
    s = Scenario(2, 2).started(2)
    before = s.state.phase
    s.do(ev.ControlStoreAway(4.0))
    assert _sentences(s) == [
        "Ray's control store has not answered for 4.0 s: training continues, "
        "nodes and workers can come again when it is back"
    ]
    assert s.state.phase == before
    assert isinstance(s.phase, Training)
    s.do(ev.ControlStoreAway(9.0))
    assert _sentences(s) == []
    s.do(ev.ControlStoreBack(12.5))
    assert _sentences(s) == ["Ray's control store answers again, after 12.5 s"]
    s.do(ev.ControlStoreBack(12.5))
    assert _sentences(s) == []


def test_no_worker_is_late_with_its_start_while_nobody_can_start() -> None:
    s = Scenario(2, 2).started(2)
    limit_s = s.state.settings.failures.worker_start_timeout_s
    s.do(ev.ControlStoreAway(4.0))
    s.do(ev.WorkerDied(1, "killed"))
    (starting,) = (w for w in s.state.fleet.workers.values() if w.phase is WorkerPhase.STARTING)
    for _ in range(20):
        s.do(ev.Tick(), after=limit_s + 1)
        assert starting.id in s.state.fleet.workers
    assert s.state.trouble.streaks.start_failures == 0

    s.do(ev.ControlStoreBack(20 * limit_s), after=1.0)
    deadline = machine.next_deadline(s.state)
    assert deadline is not None
    s.do(ev.Tick(), after=limit_s - 1)
    assert starting.id in s.state.fleet.workers
    s.do(ev.Tick(), after=2.0)
    assert starting.id not in s.state.fleet.workers, "from its return on the limit counts again"


def test_a_lost_slot_is_asked_for_again_all_the_same() -> None:
    s = Scenario(1, 2).started(2)
    s.do(ev.ControlStoreAway(4.0), ev.SlotLost(1, "its agent has ended"))
    assert any(slot.phase is SlotPhase.PENDING for slot in s.state.fleet.slots.values())
    assert any(isinstance(action, act.RequestSlot) for action in s.last)


def test_a_controller_that_was_placed_again_knows_that_it_is_back() -> None:
    s = Scenario(2, 2).started(2)
    s.do(ev.ControlStoreAway(4.0), ev.ControllerRestarted(2))
    assert not s.state.fleet.control_store_away


def test_the_wait_for_capacity_has_no_end_while_nobody_can_come() -> None:
    s = Scenario(2, 2, capacity_timeout_s=30.0).do(ev.RunStarted(), ev.ControlStoreAway(4.0))
    s.wait(100.0).do(ev.Tick())
    assert isinstance(s.phase, Waiting)
    s.do(ev.ControlStoreBack(104.0)).wait(29.0)
    assert isinstance(s.phase, Waiting), "from its return on the limit counts again"
    assert s.wait(2.0).end[0] == "no-capacity"
