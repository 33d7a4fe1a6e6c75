"""The ledgers: parts that sum to the whole exactly, and samples that are counted once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.fleet import Members, Slots, Workers
from elastic.core.incident import Incident
from elastic.core.run.phase import Closing, Ending, Finished, Joining, Pausing, RunPhase, Training, Waiting
from elastic.core.run.state import Fleet, KnownCheckpoint, RunState, Slot, SlotPhase, Trouble, Worker, WorkerPhase
from elastic.core.settings import RunSettings, ScalingSettings
from elastic.core.tables import Numbers
from elastic.core.typed_json import decode, encode
from elastic.observe import time_ledger as own
from elastic.observe.time_ledger import OWNERS, SampleCount, SampleLedger, TimeLedger, owner_of


def test_steps_are_unknown_until_a_checkpoint_covers_them() -> None:
    ledger = TimeLedger(0.0, own.START)
    ledger.switch(own.PRODUCTIVE, 5.0)
    for step in range(1, 5):
        ledger.step_done(step, 5.0 + step)
    assert ledger.totals(9.0) == {own.START: 5.0, own.UNKNOWN: 4.0}
    ledger.commit(3)
    assert ledger.totals(9.0) == {own.START: 5.0, own.PRODUCTIVE: 3.0, own.UNKNOWN: 1.0}


def test_every_instant_counts_as_often_as_accelerators_are_held() -> None:
    ledger = TimeLedger(0.0)
    ledger.hold(4, 3.0)
    ledger.switch(own.INIT, 4.0)
    ledger.switch(own.PRODUCTIVE, 6.0)
    ledger.step_done(1, 8.0, data_stall_s=0.5)
    ledger.hold(2, 9.0)
    ledger.step_done(2, 10.0, checkpoint_stall_s=0.25)
    ledger.commit(1)
    # The second step had four accelerators for a second and two for another: its stall takes three of them.
    assert ledger.held_totals(10.0) == {
        own.QUEUE: 4.0, own.INIT: 8.0, own.PRODUCTIVE: 6.0, own.DATA_STALL: 2.0, own.UNKNOWN: 5.25,
        own.CHECKPOINT_STALL: 0.75,
    }  # fmt: skip
    assert ledger.wall_s() == sum(ledger.totals(10.0).values()) == 10.0
    ledger.rollback(1)
    assert ledger.held_totals(10.0)[own.REPLAY] == 5.25
    # A second of the four accelerators that were held when it went by.
    assert ledger.move(own.INIT, own.VERIFY, 1.0) == 1.0
    assert ledger.held_totals(10.0)[own.VERIFY] == 4.0


def test_a_node_lost_in_the_middle_of_a_step_leaves_no_owner_more_accelerators_than_were_held() -> None:
    ledger = TimeLedger(0.0, own.PRODUCTIVE, held=4)
    ledger.step_done(1, 1.0)
    ledger.hold(2, 2.0)
    ledger.switch(own.DECIDE, 5.0)
    # Of four seconds with ten accelerator-seconds one is lost work.
    assert ledger.totals(5.0) == {own.UNKNOWN: 2.0, own.DETECT: 3.0}
    assert ledger.held_totals(5.0) == {own.UNKNOWN: 6.5, own.DETECT: 7.5}


def test_rolled_back_steps_and_the_broken_one_become_replay_and_the_standstill_detection() -> None:
    ledger = TimeLedger(0.0, own.PRODUCTIVE)
    for step in range(1, 5):
        ledger.step_done(step, float(step))
    ledger.commit(2)
    ledger.switch(own.DECIDE, 6.5)
    ledger.switch(own.RESHARD, 7.0)
    ledger.rollback(2)
    assert ledger.totals(8.0) == {
        own.PRODUCTIVE: 2.0, own.REPLAY: 3.0, own.DETECT: 1.5, own.DECIDE: 0.5, own.RESHARD: 1.0,
    }  # fmt: skip


def test_steps_told_together_do_not_turn_a_standstill_into_lost_work() -> None:
    ledger = TimeLedger(0.0, own.PRODUCTIVE)
    for step in range(1, 5):
        ledger.step_done(step, 4.0)
    ledger.commit(4)
    ledger.switch(own.DECIDE, 100.0)
    ledger.rollback(4)
    assert ledger.totals(100.0) == {own.PRODUCTIVE: 4.0, own.REPLAY: 4.0, own.DETECT: 92.0}


def test_a_checkpoint_that_turned_out_bad_takes_its_time_with_it() -> None:
    ledger = TimeLedger(0.0, own.PRODUCTIVE)
    for step in range(1, 5):
        ledger.step_done(step, float(step))
        ledger.commit(step)
    ledger.rollback(1)
    assert ledger.totals(4.0) == {own.PRODUCTIVE: 1.0, own.REPLAY: 3.0}


def test_stalls_are_carved_out_of_their_step_and_never_more_than_it_had() -> None:
    ledger = TimeLedger(0.0, own.PRODUCTIVE)
    ledger.step_done(1, 10.0, checkpoint_stall_s=2.0, data_stall_s=1.0, straggler_excess_s=0.5)
    ledger.step_done(2, 11.0, checkpoint_stall_s=5.0, data_stall_s=5.0)
    ledger.commit(2)
    assert ledger.totals(11.0) == {
        own.PRODUCTIVE: 6.5, own.CHECKPOINT_STALL: 3.0, own.DATA_STALL: 1.0, own.STRAGGLER_EXCESS: 0.5,
    }  # fmt: skip


def test_a_step_that_ends_while_the_run_is_being_paused_is_training() -> None:
    ledger = TimeLedger(0.0, own.PRODUCTIVE)
    ledger.step_done(1, 1.0)
    ledger.switch(own.PAUSED, 1.6)
    ledger.step_done(2, 2.0)
    ledger.switch(own.DECIDE, 3.0)
    ledger.commit(2)
    ledger.rollback(2)
    assert ledger.totals(3.0) == {own.PRODUCTIVE: 2.0, own.PAUSED: 1.0}


def test_a_late_report_owns_no_time() -> None:
    ledger = TimeLedger(0.0, own.DECIDE)
    ledger.step_done(7, 1.0, checkpoint_stall_s=1.0)
    assert ledger.totals(2.0) == {own.DECIDE: 2.0}


def test_what_is_learned_afterwards_can_be_moved() -> None:
    ledger = TimeLedger(0.0, own.RESTORE)
    ledger.switch(own.DECIDE, 2.0)
    ledger.move(own.RESTORE, own.VERIFY, 0.5)
    ledger.move(own.RESTORE, own.VERIFY, 99.0)
    assert ledger.totals(2.0) == {own.VERIFY: 2.0}


def test_an_owner_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError):
        TimeLedger(0.0).switch("coffee", 1.0)


moves = st.one_of(
    st.tuples(st.just("switch"), st.sampled_from(OWNERS), st.floats(0, 1e4)),
    st.tuples(st.just("step"), st.integers(0, 20), st.floats(0, 1e4), st.floats(0, 1e3), st.floats(-1, 1e3)),
    st.tuples(st.just("commit"), st.integers(0, 20)),
    st.tuples(st.just("rollback"), st.integers(0, 20)),
    st.tuples(st.just("move"), st.sampled_from(OWNERS), st.sampled_from(OWNERS), st.floats(0, 1e4)),
)


@given(st.floats(0, 2e9), st.lists(moves, max_size=40))
def test_every_instant_has_exactly_one_owner(start: float, history: list[tuple[object, ...]]) -> None:
    ledger, now = TimeLedger(start), start
    for kind, *values in history:
        if kind == "switch":
            now += float(str(values[1]))
            ledger.switch(str(values[0]), now)
        elif kind == "step":
            now += float(str(values[1]))
            ledger.step_done(int(str(values[0])), now, float(str(values[2])), float(str(values[3])))
        elif kind == "move":
            ledger.move(str(values[0]), str(values[1]), float(str(values[2])))
        else:
            getattr(ledger, str(kind))(values[0])
        parts = ledger.nanoseconds(now)
        assert sum(parts.values()) == round(now * 1e9) - round(start * 1e9)
        assert min(parts.values()) >= 0


seconds = st.floats(0, 100)
turns = st.one_of(
    st.tuples(st.just("hold"), st.integers(0, 8), seconds),
    st.tuples(st.just("switch"), st.sampled_from((own.PRODUCTIVE, own.PAUSED)), seconds),
    st.tuples(st.just("switch"), st.sampled_from(OWNERS), seconds),
    st.tuples(st.just("step_done"), st.integers(0, 20), seconds, seconds, seconds),
    st.tuples(st.just("commit"), st.integers(0, 20)),
    st.tuples(st.just("rollback"), st.integers(0, 20)),
    st.tuples(st.just("move"), st.sampled_from(OWNERS), st.sampled_from(OWNERS), seconds),
)


@given(st.integers(0, 4), st.lists(turns, max_size=40))
def test_no_owner_has_fewer_or_more_accelerators_than_were_held(first: int, history: list[tuple[Any, ...]]) -> None:
    ledger, now, counts, whole = TimeLedger(0.0, held=first), 0.0, [first], 0
    for kind, *values in history:
        if kind in ("hold", "switch", "step_done"):
            before, now = now, now + values[1]
            values[1] = now
            whole += counts[-1] * (round(now * 1e9) - round(before * 1e9))
        getattr(ledger, kind)(*values)
        counts += [values[0]] if kind == "hold" else []
        times, held = ledger.nanoseconds(now), ledger.held_nanoseconds(now)
        assert (sum(times.values()), sum(held.values())) == (round(now * 1e9), whole)
        for owner in OWNERS:
            assert min(counts) * times[owner] <= held[owner] <= max(counts) * times[owner], owner
        assert decode(TimeLedger, json.loads(json.dumps(encode(ledger)))) == ledger


# --- owners ----------------------------------------------------------------------------------------------------------

SETTINGS = RunSettings("r", scaling=ScalingSettings(2, 4))
BASE = KnownCheckpoint("c", 10)


def workers(*phases: WorkerPhase) -> Workers:
    return Workers({n: Worker(n, n, phase, 0.0) for n, phase in enumerate(phases)})


def test_every_stage_has_an_owner() -> None:
    blank = RunState(SETTINGS, Waiting(0, ""))
    was = Training(0)
    assert owner_of(blank) == own.QUEUE
    assert owner_of(replace(blank, fleet=Fleet(Slots({0: Slot(0, SlotPhase.PLACED, 0.0)})))) == own.PROVISION
    assert owner_of(replace(blank, fleet=Fleet(workers=workers(WorkerPhase.STARTING, WorkerPhase.READY)))) == own.START
    assert owner_of(replace(blank, fleet=Fleet(workers=workers(WorkerPhase.READY, WorkerPhase.READY)))) == own.DECIDE
    assert owner_of(replace(blank, generation=1)) == own.WAIT_FOR_CAPACITY
    joined = Joining(0, joined=Numbers({0, 1}))
    fresh = replace(blank, members=Members((0, 1)), phase=joined)
    assert owner_of(fresh) == own.INIT
    assert owner_of(replace(fresh, base=BASE, phase=Joining(0, joined=Numbers({0})))) == own.INIT
    assert owner_of(replace(fresh, base=BASE)) == own.RESTORE
    shrunk = Incident(1, "node-lost", 1, 3, 10, "")
    assert owner_of(replace(fresh, base=BASE, trouble=Trouble(incident=shrunk))) == own.RESHARD
    phases: list[tuple[RunPhase, str]] = [
        (was, own.PRODUCTIVE), (Pausing(0, 1, "grow", was), own.PAUSED), (Ending(0, 1), own.DECIDE),
        (Closing(0, 1, 5, True), own.CHECKPOINT_STALL), (Finished(0, "finished", ""), own.UNKNOWN),
    ]  # fmt: skip
    assert all(owner_of(replace(blank, phase=phase)) == owner for phase, owner in phases)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_a_regular_run_is_one_entry_and_every_sample_once() -> None:
    ledger = SampleLedger()
    for step in range(1, 1001):
        assert ledger.add(step, [((step - 1) * 8, step * 8)])
    assert len(ledger._stretches) == 1
    assert ledger.end() == 8000
    assert ledger.result(8000) == SampleCount(8000, 0, 0)
    assert ledger.result(8000).each_once


def test_rolled_back_steps_have_not_happened() -> None:
    ledger = SampleLedger()
    for step in range(1, 11):
        ledger.add(step, [((step - 1) * 8, step * 8)])
    ledger.rollback(6)
    assert ledger.result(80) == SampleCount(48, 32, 0, gaps=((48, 80),))
    for step in range(7, 11):
        ledger.add(step, [((step - 1) * 8, step * 8)])
    assert ledger.result(80).each_once
    ledger.rollback(0)
    assert ledger.result(0).each_once


def test_a_missing_a_repeated_and_an_outside_sample_are_seen() -> None:
    ledger = SampleLedger()
    ledger.add(1, [(0, 4)])
    ledger.add(2, [(3, 6), (7, 8)])
    ledger.add(3, [(8, 12)])
    assert ledger.result(10) == SampleCount(9, 1, 1, outside=2, gaps=((6, 7),))


def test_a_step_counts_once() -> None:
    ledger = SampleLedger()
    assert ledger.add(1, [(0, 4)])
    assert ledger.add(3, [(8, 12)])
    assert ledger.add(2, [(4, 8)])
    assert not any(ledger.add(step, [(0, 4)]) for step in (1, 2, 3))
    assert ledger.result(12).each_once


def test_samples_that_are_skipped_are_neither_seen_nor_missing() -> None:
    ledger = SampleLedger()
    ledger.skip([(4, 8)])
    ledger.add(1, [(0, 4)])
    ledger.add(2, [(8, 12)])
    ledger.add(3, [], skipped=[(12, 16)])
    assert ledger.end() == 16
    assert ledger.result(16) == SampleCount(8, 0, 0, skipped=8)
    assert ledger.result(16).each_once
    # What a step had without being applied is undone with the step; what the run leaves out is not.
    ledger.rollback(2)
    assert ledger.result(16) == SampleCount(8, 4, 0, gaps=((12, 16),), skipped=4)


def test_a_sample_that_was_skipped_and_consumed_shows() -> None:
    ledger = SampleLedger()
    ledger.add(1, [(0, 8)])
    ledger.skip([(4, 8)])
    assert ledger.result(8) == SampleCount(8, 0, 4)


@given(st.data())
def test_any_timeline_counts_as_the_plain_list_does(data: st.DataObject) -> None:
    ledger, plain = SampleLedger(), dict[int, list[tuple[int, int]]]()
    step = 0
    for _ in range(data.draw(st.integers(0, 15))):
        if data.draw(st.integers(0, 4)) == 0:
            step = data.draw(st.integers(0, step))
            ledger.rollback(step)
            plain = {number: ranges for number, ranges in plain.items() if number <= step}
            continue
        step += 1
        ranges = [(step * 4 - 4, step * 4)]
        if data.draw(st.integers(0, 4)) == 0:
            starts = data.draw(st.lists(st.integers(0, 40), max_size=3))
            ranges = [(start, start + data.draw(st.integers(0, 5))) for start in starts]
        ledger.add(step, ranges)
        plain[step] = ranges
    total = data.draw(st.integers(0, 50))
    consumed = [p for ranges in plain.values() for start, end in ranges for p in range(start, end)]
    inside = [p for p in consumed if p < total]
    count = ledger.result(total)
    assert count.seen == len(set(inside))
    assert count.missing == total - len(set(inside))
    assert count.repeated == len(inside) - len(set(inside))
    assert count.outside == len(consumed) - len(inside)
    assert ledger.end() == max(consumed, default=-1) + 1


def test_a_run_of_any_length_keeps_a_bounded_ledger_and_exact_sums() -> None:
    ledger = TimeLedger(0.0, "productive")
    for step in range(1, 10_001):
        ledger.step_done(step, float(step))
    assert len(ledger._tentative) <= 4_000
    ledger.rollback(9_500)
    totals = ledger.nanoseconds(10_000.0)
    assert totals["replay"] == 500 * 10**9
    ledger.commit(9_500)
    totals = ledger.nanoseconds(10_000.0)
    assert totals["productive"] == 9_500 * 10**9
    assert sum(totals.values()) == 10_000 * 10**9
