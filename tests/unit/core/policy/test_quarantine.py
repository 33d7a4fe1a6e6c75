"""Nodes that are left alone for a while, and which of two that cannot talk to each other goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.policy.quarantine import Quarantine, Strikes, avoided, left_out, next_release, struck
from elastic.core.run.phase import Pausing, Training
from elastic.core.run.state import SlotPhase
from elastic.core.settings import ScalingSettings

NODES = [f"n{number}" for number in range(7)]
PAIRS = st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)).filter(lambda pair: pair[0] != pair[1]))


def strikes(*times: float, certain: bool = False) -> Quarantine:
    table = Quarantine()
    for now in times:
        table = struck(table, "n", now, 60.0, 3600.0, certain=certain)
    return table


def test_one_loss_is_bad_luck_and_the_second_one_a_pattern() -> None:
    assert avoided(strikes(100.0), 100.0) == ()
    assert strikes(100.0, 200.0)["n"].until == 260.0
    assert strikes(100.0, 200.0, 300.0)["n"].until == 420.0
    assert avoided(strikes(100.0, 800.0), 800.0) == ()


def test_what_is_certain_counts_at_once_and_no_pause_is_longer_than_the_limit() -> None:
    assert strikes(0.0, certain=True)["n"].until == 60.0
    assert strikes(*(600.0 * n for n in range(1, 40)), certain=True)["n"].until == 600.0 * 39 + 3600.0


def test_a_node_is_forgiven_in_time() -> None:
    table = strikes(0.0, certain=True)
    assert avoided(table, 59.0) == ("n",)
    assert next_release(table, 59.0) == 60.0
    assert avoided(table, 60.0) == ()
    assert next_release(table, 60.0) is None
    assert struck(table, "n", 10_000.0, 60.0, 3600.0, certain=False)["n"].count == 1


def test_nodes_that_are_gone_for_good_do_not_fill_the_table() -> None:
    table, most = Quarantine(), 0
    for number in range(40_000):
        table = struck(table, f"gone-{number}", 601.0 * number, 60.0, 3600.0, certain=False)
        most = max(most, len(table))
    assert len(table) == len(dict(table)) == most <= 4096


@given(st.lists(st.tuples(st.sampled_from(NODES), st.floats(0.0, 900.0), st.booleans())))
def test_the_table_knows_what_a_dictionary_of_all_strikes_would(story: list[tuple[str, float, bool]]) -> None:
    table, known, now = Quarantine(), dict[str, Strikes](), 0.0
    for node, pause_s, certain in story:
        now += pause_s
        table = struck(table, node, now, 60.0, 3600.0, certain=certain)
        known[node] = table[node]
        shut = {name: old.until for name, old in known.items() if old.until > now}
        assert avoided(table, now) == tuple(sorted(shut))
        assert next_release(table, now) == min(shut.values(), default=None)
        assert dict(table).items() <= known.items()
        assert len(table) == len(dict(table))
        assert Quarantine(dict(table)) == table


@given(PAIRS)
def test_without_the_nodes_that_are_left_out_everybody_reaches_everybody(pairs: set[tuple[str, str]]) -> None:
    gone = set(left_out(NODES, pairs))
    assert not [pair for pair in pairs if not gone.intersection(pair)]
    assert gone <= {node for pair in pairs for node in pair}


@given(PAIRS)
def test_hardly_more_nodes_are_left_out_than_must_be(pairs: set[tuple[str, str]]) -> None:
    fewest = next(
        size
        for size in range(len(NODES) + 1)
        for cover in combinations(NODES, size)
        if all(set(pair) & set(cover) for pair in pairs)
    )
    assert fewest <= len(left_out(NODES, pairs)) <= 2 * fewest


def test_of_two_that_cannot_talk_the_later_one_goes_and_a_common_partner_before_both() -> None:
    assert left_out(NODES, [("n1", "n4"), ("n4", "n1")]) == ("n4",)
    assert left_out(NODES, [("n4", "n1")]) == ("n4",)
    assert left_out(NODES, [("n0", "n5"), ("n6", "n0")]) == ("n0",)
    assert left_out(NODES, [("n0", "stranger")]) == ()


# --- the machine ---


def cut(run: Scenario, one: int, other: int) -> Scenario:
    """Two members cannot reach each other: a hang in which everybody leaves as told, and what the nodes say then."""
    number, members = run.state.generation, run.state.members
    run.do(ev.ProgressStalled(number, 9, 40.0, 30.0)).left(9, *members)
    survey = run.state.saved.survey
    assert survey is not None
    assert survey.reach
    return run.do(ev.SnapshotsReported(survey.number, (), ((f"node-{one}", f"node-{other}"),)))


def test_one_of_two_nodes_that_cannot_talk_is_left_out_and_not_asked_for_again() -> None:
    run = cut(Scenario(2, 3, memory=True).started(3), 0, 2)
    assert [slot.node for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PLACED] == [
        "node-0",
        "node-1",
    ]
    (request,) = [action for action in run.last if isinstance(action, act.RequestSlot)]
    assert request.avoid == ("node-2",)
    assert run.state.trouble.incident is not None
    assert run.state.trouble.incident.lost_nodes == ("node-2",)
    assert run.state.saved.survey is not None, "what that node held went with it"
    run.do(ev.SnapshotsReported(run.state.saved.survey.number))
    assert run.state.world_size == 2


def test_a_slot_on_a_node_that_is_to_be_left_alone_is_given_back() -> None:
    run = cut(Scenario(2, 3, memory=True).started(3), 0, 2)
    (pending,) = [slot.id for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    run.do(ev.SlotPlaced(pending, "node-2"))
    assert [action.slot for action in run.last if isinstance(action, act.ReleaseSlot)] == [pending]
    assert [action.avoid for action in run.last if isinstance(action, act.RequestSlot)] == [("node-2",)]


def test_after_its_time_the_node_may_come_back() -> None:
    run = cut(Scenario(2, 3, memory=True).started(3), 0, 2)
    assert run.state.saved.survey is not None
    run.do(ev.SnapshotsReported(run.state.saved.survey.number)).train()
    run.wait(run.state.settings.failures.quarantine_s)
    (pending,) = [slot for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    assert pending.avoid == ()
    run.do(ev.SlotPlaced(pending.id, "node-2"))
    assert run.state.fleet.slots[pending.id].node == "node-2"


def back(run: Scenario) -> Scenario:
    """The node that was left out has done its time, and its worker waits to be let in."""
    assert run.state.saved.survey is not None
    run.do(ev.SnapshotsReported(run.state.saved.survey.number)).train()
    run.wait(run.state.settings.failures.quarantine_s)
    (pending,) = [slot for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    run.do(ev.SlotPlaced(pending.id, "node-2"))
    (starting,) = [worker for worker in run.state.fleet.workers.values() if worker.slot == pending.id]
    return run.do(ev.WorkerReady(starting.id, 7, "host"))


def asked(run: Scenario) -> int:
    (survey,) = run.acts(act.QuerySnapshots)
    assert survey.reach
    assert survey.nodes == ("node-0", "node-1", "node-2")
    return survey.survey


def test_a_node_with_a_history_is_let_in_once_all_have_reached_each_other() -> None:
    run = back(cut(Scenario(2, 3, memory=True).started(3), 0, 2))
    assert isinstance(run.phase, Training), "the others train while it is found out"
    run.do(ev.SnapshotsReported(asked(run)))
    assert isinstance(run.phase, Pausing)


def test_a_node_that_is_still_cut_off_does_not_stop_those_that_train() -> None:
    run = back(cut(Scenario(2, 3, memory=True).started(3), 0, 2))
    run.do(ev.SnapshotsReported(asked(run), (), (("node-2", "node-0"),)))
    assert isinstance(run.phase, Training)
    assert run.state.fleet.quarantine["node-2"].count == 2, "it is quarantined for longer"
    assert "node-2" not in run.state.fleet.nodes
    assert run.state.world_size == 2


def test_members_of_a_generation_that_trains_are_not_the_ones_to_go() -> None:
    """Two newcomers that one member cannot reach: left out are the two, although without the one all would be well."""
    run = cut(Scenario(2, 4, memory=True).started(4), 0, 3)
    assert run.state.saved.survey is not None
    run.do(ev.SnapshotsReported(run.state.saved.survey.number, (), (("node-1", "node-2"),)))
    assert run.state.saved.survey is not None
    run.do(ev.SnapshotsReported(run.state.saved.survey.number)).train()
    assert run.state.world_size == 2
    run.wait(run.state.settings.failures.quarantine_s)
    pending = [slot.id for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    run.do(*(ev.SlotPlaced(slot, node) for slot, node in zip(pending, ("node-2", "node-3"), strict=True)))
    starting = [worker.id for worker in run.state.fleet.workers.values() if worker.slot in pending]
    run.do(*(ev.WorkerReady(worker, 7, "host") for worker in starting))
    (survey,) = run.acts(act.QuerySnapshots)
    run.do(ev.SnapshotsReported(survey.survey, (), (("node-0", "node-2"), ("node-0", "node-3"))))
    assert isinstance(run.phase, Training)
    assert run.state.fleet.nodes == ("node-0", "node-1")


def test_where_nobody_answers_the_node_is_given_the_benefit_of_the_doubt() -> None:
    run = back(cut(Scenario(2, 3, memory=True).started(3), 0, 2))
    run.wait(run.state.settings.failures.survey_timeout_s)
    assert isinstance(run.phase, Pausing)


def test_a_burst_of_bad_nodes_does_not_have_every_waiting_slot_asked_for_again() -> None:
    run = Scenario(2, 40, memory=True).started(3)
    asked_for = len(run.state.fleet.slots)
    for node in ("node-2", "node-1"):
        table = struck(run.state.fleet.quarantine, node, run.now, 60.0, 3600.0, certain=True)
        run.state = replace(run.state, fleet=replace(run.state.fleet, quarantine=table))
        run.do(ev.Tick())
        assert not run.acts(act.RequestSlot)
    run.wait(61.0)
    assert len(run.state.fleet.slots) == asked_for


def test_nodes_that_have_done_their_time_are_open_to_the_slots_that_wait_one_after_the_other() -> None:
    run = cut(Scenario(2, 3, memory=True).started(3), 0, 2)
    run.state = replace(run.state, settings=replace(run.state.settings, scaling=ScalingSettings(2, 5)))
    run.do(ev.Tick())
    waiting = [slot for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    assert [slot.avoid for slot in waiting] == [("node-2",)] * 3
    run.wait(61.0)
    waiting = [slot for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    assert sorted(slot.avoid for slot in waiting) == [(), ("node-2",), ("node-2",)]
    (free,) = [slot.id for slot in waiting if not slot.avoid]
    run.do(ev.SlotPlaced(free, "node-2"))
    waiting = [slot for slot in run.state.fleet.slots.values() if slot.phase is SlotPhase.PENDING]
    assert sorted(slot.avoid for slot in waiting) == [(), ("node-2",)]


def test_why_nothing_in_memory_can_be_used_is_told() -> None:
    run = Scenario(2, 3, memory=True).started(3).commit(5).lose_node(1).left(6)
    missing = "snapshot memory:step-00000006-g0001 is not whole: no node that answers has the shard of rank 1"
    run.do(ev.SnapshotsReported(run.state.saved.surveys, (), (), (missing,)))
    assert missing in run.said()
    assert "from storage" in run.said()
