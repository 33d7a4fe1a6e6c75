"""What the tables of slots and workers say without looking at each entry is what a look at each entry says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.fleet import Members, Slot, SlotPhase, Slots, Worker, WorkerPhase, Workers
from elastic.core.run.phase import Training, Waiting
from elastic.core.run.state import Fleet, Notice, RunState
from elastic.core.settings import RunSettings, ScalingSettings
from elastic.core.tables import Numbers
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


@given(st.data())
def test_who_could_be_a_member(data: st.DataObject) -> None:
    """In slots of up to three workers, of which some are starting, inside, evicted, or on nodes that go away."""
    numbers = range(data.draw(st.integers(0, 5)))
    on = {n: data.draw(st.sampled_from(("a", "b", "c", None))) for n in numbers}
    slots = Slots({n: Slot(n, SlotPhase.PLACED if node else SlotPhase.PENDING, 0.0, node) for n, node in on.items()})
    placed = [n for n, node in on.items() if node]
    where = data.draw(st.lists(st.sampled_from(placed), max_size=9)) if placed else []
    phases = [data.draw(st.sampled_from(WorkerPhase)) for _ in where]
    table = Workers({n: Worker(n, slot, phases[n], 0.0) for n, slot in enumerate(where)})
    ready = [n for n, phase in enumerate(phases) if phase is WorkerPhase.READY]
    inside = data.draw(st.sets(st.sampled_from(ready))) if ready else set()
    draining = {n: Notice(0.0, urgent=data.draw(st.booleans())) for n in data.draw(st.sets(st.sampled_from("abc")))}
    evicted = tuple(data.draw(st.sets(st.sampled_from(placed)))) if placed else ()
    fleet = Fleet(slots, table, Numbers(inside), draining=draining, evicted=evicted)
    phase = data.draw(st.sampled_from((Waiting(0.0, ""), Training(0.0))))
    settings = RunSettings("r", scaling=ScalingSettings(data.draw(st.integers(1, 6)), 10))
    state = RunState(settings, phase, members=Members(sorted(inside, reverse=True)), fleet=fleet)

    idle = [w for w in table.values() if w.id in ready and w.id not in inside and w.slot not in evicted]
    notice = {w.id: draining.get(on[w.slot] or "") for w in idle}
    free = [w for w in idle if notice[w.id] is None]
    if isinstance(phase, Waiting) and len(free) < settings.scaling.min_workers:
        free = [w for w in idle if (told := notice[w.id]) is None or not told.urgent]
    found = {slot.id: workers for slot, workers in state.idle_slots}
    assert found == {n: there for n in numbers if (there := tuple(w.id for w in free if w.slot == n))}
    assert list(found) == sorted(found)
    assert state.idle_count == len(free)
    assert fleet.idle == len(set(ready) - inside)
    assert state.members_inside == tuple(sorted(inside, reverse=True))
    assert (state.anyone_inside, [state.is_inside(n) for n in ready]) == (bool(inside), [n in inside for n in ready])


def check(table: Workers) -> None:
    for slot in range(3):
        assert {w.id for w in table.in_slot(slot)} == {w.id for w in table.values() if w.slot == slot}
        assert table.in_slot(slot) == [table[number] for number in table.numbers_in(slot)]
    assert table.starting == {w.id for w in table.values() if w.phase is WorkerPhase.STARTING}
    assert decode(Fleet, encode(Fleet(workers=table))).workers == table


def test_members_know_their_ranks() -> None:
    members = Members((7, 3, 9))
    assert (members, members.ranks.get(9), members.ranks.get(1)) == ((7, 3, 9), 2, None)
    assert 3 in members
    assert 2 not in members
