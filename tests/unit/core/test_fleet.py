"""What the tables of slots and workers say without looking at each entry is what a look at each entry says."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.fleet import Members, Slot, SlotPhase, Slots, Worker, WorkerPhase, Workers
from elastic.core.run.state import Fleet
from elastic.core.typed_json import decode, encode

few = st.integers(0, 5)
nodes = st.sampled_from((None, "a", "b", "c"))
slots = st.builds(
    lambda number, node, failures, avoid: Slot(
        number, SlotPhase.PENDING if node is None else SlotPhase.PLACED, 0.0, node, failures, avoid
    ),
    few, nodes, st.integers(0, 2), st.sampled_from(((), ("a",), ("a", "b"))),
)  # fmt: skip
workers = st.builds(lambda number, phase: Worker(number, number // 2, phase, 0.0), few, st.sampled_from(WorkerPhase))


@given(st.lists(st.one_of(st.lists(slots, max_size=3), few)))
def test_slots(history: list[list[Slot] | int]) -> None:
    table = Slots()
    for change in history:
        table = table.without((change,)) if isinstance(change, int) else table.put({slot.id: slot for slot in change})
        there = sorted(table.values(), key=lambda slot: slot.id)
        pending = [slot for slot in there if slot.phase is SlotPhase.PENDING]
        assert table.pending == {slot.id for slot in pending}
        assert table.failing == {slot.id for slot in there if slot.start_failures}
        for node in ("a", "b", "c"):
            assert table.on(node) == tuple(slot.id for slot in there if slot.node == node)
        shut = frozenset.intersection(*(frozenset(slot.avoid) for slot in pending)) if pending else frozenset()
        assert table.shut == shut
        again = Slots(table)
        assert (again.pending, again.failing, again.shut) == (table.pending, table.failing, table.shut)


@given(st.lists(st.one_of(st.lists(workers, max_size=3), few)))
def test_workers(history: list[list[Worker] | int]) -> None:
    table = Workers()
    for change in history:
        table = table.without((change,)) if isinstance(change, int) else table.put({w.id: w for w in change})
        check(table)


later = st.sampled_from((WorkerPhase.IDLE, WorkerPhase.MEMBER))


@given(st.lists(workers, max_size=6), st.lists(st.tuples(st.lists(few, max_size=4), later), min_size=1, max_size=3))
def test_workers_change_their_phase(there: list[Worker], changes: list[tuple[list[int], WorkerPhase]]) -> None:
    table = Workers({worker.id: worker for worker in there})
    for numbers, phase in changes:
        before = dict(table)
        wanted = {number: replace(before[number], phase=phase) for number in numbers if number in before}
        changed = table.in_phase(numbers, phase)
        assert dict(table) == before
        assert dict(changed) == before | wanted
        check(changed)
        table = changed


def check(table: Workers) -> None:
    for phase in WorkerPhase:
        assert table.count(phase) == sum(worker.phase is phase for worker in table.values())
    for slot in range(3):
        assert {w.id for w in table.in_slot(slot)} == {w.id for w in table.values() if w.slot == slot}
    assert table.starting == {w.id for w in table.values() if w.phase is WorkerPhase.STARTING}
    assert decode(Fleet, encode(Fleet(workers=table))).workers == table


def test_members_know_their_ranks() -> None:
    members = Members((7, 3, 9))
    assert (members, members.ranks.get(9), members.ranks.get(1)) == ((7, 3, 9), 2, None)
    assert 3 in members
    assert 2 not in members
