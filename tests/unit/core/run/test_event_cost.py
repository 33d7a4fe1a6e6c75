"""What one event costs, counted in the interpreter's instructions: the same in a run of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.checkpoint.snapshots import Snapshot, copies_of, place_replicas, snapshot_id
from elastic.core.event_groups import together
from elastic.core.policy.quarantine import Quarantine, struck
from elastic.core.run import machine

RANKS = 4
FEW, MANY = 8, 80


def placing(nodes: int) -> Scenario:
    return Scenario(RANKS, nodes * RANKS, RANKS, memory=True).do(ev.RunStarted())


def starting(nodes: int) -> Scenario:
    """As many workers to wait for as there are."""
    s = Scenario(nodes * RANKS, nodes * RANKS, RANKS, memory=True).do(ev.RunStarted())
    return s.do(*(ev.SlotPlaced(slot, f"node-{slot}") for slot in s.state.fleet.slots))


def joining(nodes: int) -> Scenario:
    s = starting(nodes)
    return s.do(*(ev.WorkerReady(worker, worker, "host") for worker in s.state.fleet.workers))


def training(nodes: int) -> Scenario:
    s = joining(nodes).train()
    return s.do(ev.FirstStepDone(s.state.generation, 1))


def ending(nodes: int) -> Scenario:
    return training(nodes).do(ev.SlotLost(0, "gone"))


def draining(nodes: int) -> Scenario:
    """Of one node is known that it goes away; the others are too few without it."""
    return training(nodes).do(ev.NodesDraining((("node-1", 5000.0),)))


CASES: dict[str, tuple[Callable[[int], Scenario], ev.Event]] = {
    "placed": (placing, ev.SlotPlaced(5, "node-5")),
    "ready": (starting, ev.WorkerReady(5, 5, "host")),
    "joined": (joining, ev.GroupJoined(1, 5)),
    "trains": (joining, ev.TrainingReached(1, 5, 0)),
    "left": (ending, ev.WorkerLeft(1, 5, 1)),
    "committed": (training, ev.CheckpointCommitted("c", 1, 1)),
    "committed while a node drains": (draining, ev.CheckpointCommitted("c", 1, 1)),
    "time passes": (training, ev.Tick()),
}


def instructions(work: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += what == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 counts none of the first call where no frame has asked for them before.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", CASES)
def test_an_event_costs_the_same_in_a_run_of_any_size(name: str) -> None:
    story, event = CASES[name]

    def cost(nodes: int) -> int:
        s = story(nodes)
        assert machine.step(s.state, event, s.now)[0] is not s.state or isinstance(event, ev.Tick)
        return instructions(lambda: machine.next_deadline(machine.step(s.state, event, s.now)[0]))

    few, many = cost(FEW), cost(MANY)
    # Chunks, and the buckets of names, are fuller.
    assert many <= 1.1 * few + 300, f"{FEW} nodes: {few} instructions, {MANY} nodes: {many}"


@pytest.mark.parametrize("report", [ev.GroupJoined, ev.TrainingReached, ev.WorkerLeft])
def test_reports_of_one_turn_cost_less_together(report: type[Any]) -> None:
    s = ending(MANY) if report is ev.WorkerLeft else joining(MANY)
    workers = list(s.state.members_inside)[:100]
    rest = () if report is ev.GroupJoined else (1,)
    events = [report(1, worker, *rest) for worker in workers]
    ((event, _),) = together(events)
    single = instructions(lambda: machine.step(s.state, events[0], s.now))
    assert instructions(lambda: machine.step(s.state, event, s.now)) < single * len(events) / 5


def test_a_lost_node_costs_little_for_each_member_that_stays() -> None:
    """The others leave, say what they hold, and begin anew: once for all of them, with little to do for each."""

    def cost(nodes: int) -> int:
        s = Scenario(RANKS, nodes * RANKS, RANKS, memory=True).started(nodes)
        names = [f"node-{number}" for number in range(nodes)]
        of_ranks = [name for name in names for _ in range(RANKS)]
        placed = zip(of_ranks, place_replicas(of_ranks, 1), strict=True)
        held = [tuple(node for node in (own, *others) if node != names[0]) for own, others in placed]
        copies = copies_of(Snapshot(1, 1, tuple(held)))

        def lose() -> None:
            s.do(ev.SlotLost(0, "gone"))
            ((left, _),) = together([ev.WorkerLeft(1, worker, 1) for worker in s.state.members_inside])
            s.do(left)
            assert s.state.saved.survey is not None
            found = ((snapshot_id(1, 1), 1),)
            s.do(ev.SnapshotsReported(s.state.saved.survey.number, found, (), (), copies.ranks, copies.nodes))

        count = instructions(lose)
        assert len(s.acts(act.BeginGeneration)[0].members) == (nodes - 1) * RANKS
        return count

    # Placing ranks on nodes included; it was 605 when each member's record said whether it is inside.
    assert cost(MANY) - cost(FEW) <= 400 * (MANY - FEW) * RANKS


def test_a_strike_costs_the_same_however_many_nodes_have_one() -> None:
    def cost(nodes: int) -> int:
        table = Quarantine()
        for number in range(nodes):
            table = struck(table, f"node-{number}", 1.0, 60.0, 3600.0, certain=False)
        return instructions(lambda: struck(table, "one more", 2.0, 60.0, 3600.0, certain=False))

    assert cost(1000) <= 1.1 * cost(10) + 300
