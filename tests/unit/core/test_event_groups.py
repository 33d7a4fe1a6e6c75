"""What a turn takes together: the same state, and the same actions, as the same reports one after another."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_scenario import Scenario

from elastic.core import events as ev
from elastic.core.event_groups import apart, together
from elastic.core.run.phase import Ending, Joining, Pausing, Training, Waiting


def joining() -> Scenario:
    return Scenario(low=4, high=6, per_slot=2, memory=True).do(ev.RunStarted()).nodes(3)


def training() -> Scenario:
    return joining().train()


def promising() -> Scenario:
    """One of four has, to grow."""
    s = Scenario(low=4, high=6, per_slot=2, memory=True).started(2).nodes(1)
    return s.do(ev.StopPromised(1, 2, 4, True))


def stopping() -> Scenario:
    s = training().do(ev.StopRequested("enough"))
    return s.do(*(ev.StopPromised(s.state.generation, worker, 3) for worker in s.state.members))


def ending() -> Scenario:
    return training().do(ev.SlotLost(0, "gone"))


def ending_with_a_worn_slot() -> Scenario:
    """Two failed starts too many next to members: the slot is released when they have left."""
    s = training().do(ev.WorkerDied(0, "killed"))
    for _ in range(9):
        s.do(*(ev.WorkerStartFailed(worker, "no") for worker in s.state.fleet.workers.starting))
    return s


STORIES: dict[str, tuple[Callable[[], Scenario], type]] = {
    "joining": (joining, Joining),
    "training": (training, Training),
    "promising": (promising, Pausing),
    "stopping": (stopping, Pausing),
    "ending": (ending, Ending),
    "worn": (ending_with_a_worn_slot, Ending),
}


@pytest.mark.parametrize("name", STORIES)
def test_the_stories_lead_where_they_say(name: str) -> None:
    story, phase = STORIES[name]
    assert isinstance(story().state.phase, phase)


def report(kind: type[ev.Event], generation: int, worker: int, step: int, memory: bool) -> ev.Event:
    named = {ev.GroupJoined: (), ev.StopPromised: (step, memory)}.get(kind, (step,))
    return kind(generation, worker, *named)  # type: ignore[call-arg]


KINDS = st.sampled_from((ev.GroupJoined, ev.TrainingReached, ev.StopPromised, ev.WorkerLeft))
reports = st.builds(
    report, KINDS, st.sampled_from((1, 1, 1, 1, 2)), st.integers(0, 6), st.sampled_from((3, 3, 2, 4)), st.booleans(),
)  # fmt: skip
alike = st.builds(
    lambda kind, workers, memory: [report(kind, 1, worker, 3, memory) for worker in workers],
    KINDS, st.lists(st.integers(0, 6), min_size=6), st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
@given(st.one_of(alike, st.lists(reports, max_size=12)))
def test_together_they_lead_where_one_after_another_leads(name: str, events: list[ev.Event]) -> None:
    story, _ = STORIES[name]
    single = story().do(*events, after=0.0)
    as_one = story().do(*(event for event, _ in together(events)), after=0.0)
    assert as_one.state == single.state
    assert sorted(map(repr, as_one.last)) == sorted(map(repr, single.last))


def test_all_members_that_leave_are_one_event_and_the_next_generation_follows() -> None:
    s = ending()
    left = [ev.WorkerLeft(s.state.generation, worker, 3) for worker in s.state.members_inside]
    ((event, parts),) = together(left)
    assert parts == left
    assert isinstance(s.do(event).state.phase, Waiting)


def test_what_is_taken_together_is_in_the_journal_as_one_event() -> None:
    left = [ev.WorkerLeft(2, worker, worker) for worker in (5, 3)]
    promised = [ev.StopPromised(3, worker, 7, worker < 3) for worker in range(4)]
    made = together([ev.Tick(), *left, ev.WorkerLeft(3, 5, 1), ev.GroupJoined(3, 5), ev.GroupJoined(3, 6), *promised])
    events = [event for event, _ in made]
    assert events == [
        ev.Tick(),
        ev.MembersReported(2, "WorkerLeft", (5, 3), (5, 3)),
        ev.WorkerLeft(3, 5, 1),
        ev.MembersReported(3, "GroupJoined", (5, 6), (0, 0)),
        ev.MembersReported(3, "StopPromised", (0, 1, 2), (7, 7, 7), True),
        ev.StopPromised(3, 3, 7),
    ]
    assert [parts for _, parts in made][1] == left
    assert [apart(event) for event in events] == [parts for _, parts in made]
    assert [ev.from_json(json.loads(json.dumps(ev.to_json(event)))) for event in events] == events
