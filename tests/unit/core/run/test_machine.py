"""The machine and its caller: fencing, replay, restarts, deadlines, and never raising."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.mesh import MeshSettings
from elastic.core.run import machine
from elastic.core.run.phase import Closing, Ending, Finished, Joining, Pausing, Training, Waiting
from elastic.core.run.state import WorkerPhase

STORIES = {
    "Waiting": lambda: Scenario(2, 3).do(ev.RunStarted()).nodes(1),
    "Joining": lambda: Scenario(2, 2).do(ev.RunStarted()).nodes(2),
    "Training": lambda: Scenario(2, 2).started(2),
    "Pausing": lambda: Scenario(2, 3).started(2).nodes(1),
    "Ending": lambda: Scenario(2, 2).started(2).do(ev.CollectiveFailed(1, 0, 3, "broken")),
    "Closing": lambda: Scenario(2, 2).started(2).completed(9),
    "Finished": lambda: Scenario(2, 2).started(2).completed(9).commit(9),
}


@pytest.mark.parametrize("phase", STORIES)
def test_the_journal_leads_to_the_same_state(phase: str) -> None:
    s = STORIES[phase]()
    assert type(s.phase).__name__ == phase
    state = machine.initial(s.state.settings, 1000.0)
    for event, now in s.journal:
        record = json.loads(json.dumps(ev.to_json(event)))
        assert ev.from_json(record) == event
        state, _ = machine.step(state, ev.from_json(record), now)
    assert state == s.state


@pytest.mark.parametrize("phase", STORIES)
def test_messages_of_other_generations_change_nothing(phase: str) -> None:
    s = STORIES[phase]()
    before = s.state
    for generation in (0, s.state.generation - 1, s.state.generation + 1):
        s.do(*generation_events(generation, 0))
        assert s.state is before
        assert not s.last
    if phase in ("Waiting", "Closing", "Finished"):
        s.do(*generation_events(s.state.generation, 0))
        assert s.state is before


def generation_events(generation: int, worker: int) -> list[ev.Event]:
    return [
        ev.GroupJoined(generation, worker), ev.TrainingReached(generation, worker, 5),
        ev.FirstStepDone(generation, 99), ev.ProgressStalled(generation, 5, 1.0, 1.0),
        ev.CollectiveFailed(generation, worker, 99, "late"), ev.UserCodeFailed(generation, worker, 99, "late"),
        ev.RestoreFailed(generation, worker, "c", "late"), ev.StopPromised(generation, worker, 99),
        ev.WorkerLeft(generation, worker, 99), ev.WorkerCompleted(generation, worker, 99, True),
    ]  # fmt: skip


def test_a_checkpoint_is_never_fenced() -> None:
    s = Scenario(2, 2).started(2).broken(0).do(ev.CheckpointCommitted("c7", 7, 1))
    assert s.state.saved.newest_checkpoint is not None
    assert s.state.saved.newest_checkpoint.step == 7


# --- restarts --------------------------------------------------------------------------------------------------------


def restarted(phase: str) -> Scenario:
    return STORIES[phase]().do(ev.ControllerRestarted(2), after=1000.0)


@pytest.mark.parametrize("phase", STORIES)
def test_nobody_is_late_because_the_controller_was_away(phase: str) -> None:
    s, restarted_ = STORIES[phase](), restarted(phase)
    assert type(restarted_.phase) is type(s.phase)
    assert not restarted_.acts(act.EndGeneration) or phase == "Ending"
    assert not restarted_.acts(act.KillWorker)
    deadline = machine.next_deadline(restarted_.state)
    assert deadline is None or deadline > restarted_.now


def test_what_was_under_way_is_asked_for_again() -> None:
    waiting = restarted("Waiting")
    assert waiting.acts(act.RequestSlot) == [act.RequestSlot(1, 1), act.RequestSlot(2, 1)]
    starting = Scenario(2, 2).do(ev.RunStarted(), ev.SlotPlaced(0, "a")).do(ev.ControllerRestarted(2))
    assert starting.acts(act.StartWorker) == [act.StartWorker(0, 0)]
    assert restarted("Joining").acts(act.BeginGeneration) == [act.BeginGeneration(1, (0, 1), None, 0)]
    assert restarted("Pausing").acts(act.ProposeStop) == [act.ProposeStop(1, (0, 1))]
    assert restarted("Ending").acts(act.EndGeneration)[0].workers == (0, 1)
    assert restarted("Finished").acts(act.FinishRun)[0].status == "finished"
    held = STORIES["Pausing"]().do(ev.StopPromised(1, 0, 7), ev.StopPromised(1, 1, 8), ev.WorkerLeft(1, 0, 8))
    held.do(ev.ControllerRestarted(2))
    assert held.acts(act.CommitStop) == [act.CommitStop(1, (1,), 8)]


def test_training_goes_on_over_a_restart() -> None:
    s = restarted("Training")
    assert [type(action) for action in s.last] == [act.Note]
    assert isinstance(s.phase, Training)


def test_a_suspicion_does_not_outlive_the_controller_that_had_it() -> None:
    s = STORIES["Training"]().do(ev.WorkersSilent((1,), 1.0)).do(ev.ControllerRestarted(2), after=60.0).wait(60)
    assert isinstance(s.phase, Training)


@pytest.mark.parametrize("phase", [phase for phase in STORIES if phase != "Finished"])
def test_a_generation_that_no_journal_tells_of_is_ended_and_its_number_is_not_used_again(phase: str) -> None:
    """Begun while the journal could not be written, by a controller that was killed before it could."""
    s = STORIES[phase]()
    there = [worker.id for worker in s.state.fleet.workers.values() if worker.phase is not WorkerPhase.STARTING]
    s.do(ev.ControllerRestarted(2, newest_generation=7, next_slot=20, next_worker=30))
    assert isinstance(s.phase, Ending)
    assert s.acts(act.EndGeneration) == [act.EndGeneration(7, tuple(there), "the controller was restarted meanwhile")]
    assert "workers know of generation 7" in s.said()
    # Whoever says something about the last one that is known here is late, or resends what nobody wrote down.
    before = s.state
    s.do(*generation_events(1, 0))
    assert s.state is before
    s.left(9).nodes(3).wait(5)
    assert [action.generation for action in s.acts(act.BeginGeneration)] in ([8], [])
    assert s.state.generation == 8
    assert s.state.furthest_step >= 9
    assert all(slot < 4 or slot >= 20 for slot in s.state.fleet.slots)
    assert all(worker < 4 or worker >= 30 for worker in s.state.fleet.workers)


def test_a_worker_that_was_starting_may_have_become_a_member_since() -> None:
    s = Scenario(2, 3).started(2).do(ev.SlotPlaced(2, "c"))
    s.do(ev.ControllerRestarted(2, newest_generation=7))
    assert [action.worker for action in s.acts(act.KillWorker)] == [2]
    assert s.acts(act.StartWorker) == [act.StartWorker(3, 2)]


FOUND: dict[str, Callable[[Scenario], ev.Event]] = {
    "snapshots": lambda s: ev.SnapshotsReported(
        s.acts(act.QuerySnapshots)[-1].survey, (("memory:step-00000009-g0007", 9),)
    ),
    "a checkpoint": lambda s: ev.CheckpointCommitted("step-00000009-g0007", 9, 7),
}


@pytest.mark.parametrize("found", FOUND)
def test_a_generation_that_was_forgotten_is_ended_before_the_next_begins(found: str) -> None:
    """A frozen worker may still be inside: its controller was killed before it could write down that it has begun."""
    s = Scenario(2, 2, memory=True).started(2).broken(0)
    s.do(FOUND[found](s))
    assert isinstance(s.phase, Ending)
    assert [(told.generation, told.workers) for told in s.acts(act.EndGeneration)] == [(7, (0, 1))]
    assert s.acts(act.BeginGeneration) == []
    s.left(9)
    survey = s.acts(act.QuerySnapshots)[-1].survey
    s.do(ev.SnapshotsReported(survey, (("memory:step-00000009-g0007", 9),)))
    assert s.acts(act.BeginGeneration) == [act.BeginGeneration(8, (0, 1), "memory:step-00000009-g0007", 9)]


def test_on_which_mesh_a_forgotten_generation_was_is_forgotten_too() -> None:
    """Of three ranks, while the one that is known had two, in cells of two."""
    mesh = MeshSettings(ep=2, choices={"ep": (1, 2)})
    s = Scenario(2, 2, memory=True, mesh=mesh).started(2).broken(0)
    assert s.state.axes == {"ep": 2}
    s.do(FOUND["snapshots"](s)).left(9)
    held = (("a", ((0, 1),), ()), ("b", ((1, 3),), ()))
    survey = s.acts(act.QuerySnapshots)[-1].survey
    s.do(ev.SnapshotsReported(survey, (("memory:step-00000009-g0007", 9),), ranks=3, copies=held))
    assert [action.generation for action in s.acts(act.BeginGeneration)] == [8]


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_messages_that_waited_are_heard_before_deadlines_are_enforced() -> None:
    s = STORIES["Ending"]().do(ev.WorkerLeft(1, 0, 3), after=100.0)
    assert isinstance(s.phase, Ending), "worker 1 may have left, too: its message is next"
    s.do(ev.WorkerLeft(1, 1, 3))
    assert isinstance(s.phase, Joining)
    silent = STORIES["Training"]().do(ev.WorkersSilent((0, 1), 1.0)).do(ev.ProbeAnswered(0), after=100.0)
    silent.do(ev.ProbeAnswered(1))
    assert silent.state.trouble.false_alarms == 1


@pytest.mark.parametrize("phase", ["Joining", "Pausing", "Ending", "Closing"])
def test_every_stage_that_waits_for_somebody_has_a_deadline_and_passes_it(phase: str) -> None:
    s = STORIES[phase]()
    before = s.phase
    deadline = machine.next_deadline(s.state)
    assert deadline is not None
    s.wait(deadline - s.now)
    assert type(s.phase) is not type(before)


# --- anything at all -------------------------------------------------------------------------------------------------

small = st.integers(0, 4)
steps = st.integers(0, 12)
anything = st.one_of(
    st.builds(ev.StopRequested, st.just("enough")),
    st.builds(ev.ControllerRestarted, small, st.one_of(st.just(0), small), small, small),
    st.builds(ev.Tick),
    st.builds(ev.SlotPlaced, small, st.sampled_from(("a", "b"))),
    st.builds(ev.SlotLost, small, st.just("gone")),
    st.builds(ev.WorkerReady, small, small, st.just("host")),
    st.builds(ev.WorkerStartFailed, small, st.just("no"), st.booleans()),
    st.builds(ev.WorkerDied, small, st.just("dead")),
    st.builds(ev.WorkersSilent, st.lists(small, max_size=4).map(tuple), st.just(1.0), st.sampled_from(((), ("a",)))),
    st.builds(ev.ProbeAnswered, small),
    st.builds(ev.CheckpointCommitted, st.sampled_from(("c1", "c2")), steps, small),
    st.builds(ev.SaveFailing, steps, st.just("503"), st.just(1.0), st.none() | small),
    st.builds(ev.ControlStoreAway, st.just(4.0)),
    st.builds(ev.ControlStoreBack, st.just(9.0)),
    st.builds(ev.RunStarted, st.sampled_from(((), (("c1", 3),))), small),
    st.builds(lambda generation, worker, which: generation_events(generation, worker)[which],
              st.integers(0, 3), small, st.integers(0, 9)),
)  # fmt: skip


later_by = st.sampled_from((0.0, 0.1, 3.0, 500.0))


@given(st.sampled_from(sorted(STORIES)), st.lists(st.tuples(anything, later_by), max_size=30))
def test_any_event_in_any_state_is_taken(phase: str, events: list[tuple[Any, float]]) -> None:
    """Nothing raises, nothing spins, numbers only grow, and what does not count changes nothing."""
    s = STORIES[phase]()
    for event, later in events:
        before = s.state
        fenced = machine.is_fenced(before, event)
        s.do(event, after=later)
        after = s.state
        assert after.generation >= before.generation
        assert after.furthest_step >= before.furthest_step
        assert len(after.fleet.slots) <= after.settings.scaling.max_slots
        assert not (fenced and (s.last or after is not before))
        if isinstance(after.phase, Joining | Training):
            assert set(after.members_inside) == set(after.members)
        if isinstance(after.phase, Joining | Pausing | Ending | Closing):
            assert machine.next_deadline(after) is not None
        if isinstance(after.phase, Finished):
            assert not after.fleet.slots
        if isinstance(event, ev.Tick):
            deadline = machine.next_deadline(after)
            assert deadline is None or deadline > s.now
        if isinstance(after.phase, Waiting):
            assert after.phase.reason
