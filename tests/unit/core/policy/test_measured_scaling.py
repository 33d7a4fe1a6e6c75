"""Scaling by measured facts: one test per regime, the state machine with it, and the table that is journaled."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.policy.measured import Measured
from elastic.core.policy.measured_scaling import MeasuredScaling, table
from elastic.core.policy.scaling import EagerScaling, ScalingFacts
from elastic.core.run.phase import Joining, Training, Waiting
from elastic.core.settings import ScalingSettings

POLICY = MeasuredScaling()
# A node of eight is lost; steps are linear in the world size; a resize takes 2 s, a recovery 3 s.
KNOWN = Measured((3.0,), (2.0,), (10.0, 11.0, 12.0), {8: 1.0, 7: 8 / 7}, 3, 3 * 8 * 3600.0)
LOST = ScalingFacts(
    ScalingSettings(2, 8), 100.0, 7, 0, 1, waiting_since=100.0, measured=KNOWN, wanted=8, lost=1, lost_at=99.5
)  # fmt: skip


def after(*seconds: float) -> ScalingFacts:
    """As LOST, where replacements took so long."""
    return replace(LOST, measured=replace(KNOWN, replacement_s=seconds))


def test_a_fast_replacement_is_waited_for() -> None:
    verdict = POLICY.start(after(1.0, 1.2, 1.4))
    assert (verdict.go, verdict.chosen) == (False, "wait")
    assert verdict.again_at is not None
    assert 100.9 < verdict.again_at < 103.0
    shrink, wait = verdict.options
    assert wait.lost_node_s < shrink.lost_node_s


def test_a_slow_replacement_is_not_waited_for() -> None:
    verdict = POLICY.start(after(300.0, 400.0, 350.0))
    assert (verdict.go, verdict.size, verdict.chosen) == (True, 7, "shrink")


def test_a_spare_at_hand_is_used() -> None:
    facts = replace(after(1.0, 1.2), settings=ScalingSettings(2, 8, spare_slots=1), idle=8)
    verdict = POLICY.start(facts)
    assert (verdict.go, verdict.size, verdict.chosen) == (True, 8, "spare")
    assert [option.name for option in verdict.options] == ["spare", "shrink", "wait"]
    assert min(verdict.options, key=lambda option: option.lost_node_s).name == "spare"


@pytest.mark.parametrize(
    "unknown",
    [
        replace(KNOWN, replacement_s=()), replace(KNOWN, recovery_s=(), resize_s=()), Measured(),
        replace(KNOWN, replacement_s=(0.2,)),
    ],
)  # fmt: skip
def test_without_facts_it_decides_as_the_default_does(unknown: Measured) -> None:
    for idle, pending, waited in product(range(10), (0, 1), (0.0, 20.0)):
        facts = replace(LOST, idle=idle, pending_slots=pending, waiting_since=100.0 - waited, lost_at=79.5)
        facts = replace(facts, measured=unknown, lost_at=facts.waiting_since - 0.5)
        assert POLICY.start(facts) == EagerScaling().start(facts)


def test_where_nothing_was_asked_for_nothing_is_waited_for() -> None:
    assert POLICY.start(replace(after(1.0, 1.0), pending_slots=0)).go


def test_a_wait_ends_when_nothing_comes() -> None:
    facts = after(1.0, 1.2, 1.4)
    until = POLICY.start(facts).again_at
    assert until is not None
    verdict = POLICY.start(replace(facts, now=until))
    assert (verdict.go, verdict.size, verdict.chosen) == (True, 7, "shrink")
    assert "no replacement has come within" in verdict.reason


def test_nodes_that_were_never_replaced_speak_against_waiting() -> None:
    close = after(1.5, 1.5)
    assert POLICY.start(close).chosen == "wait"
    assert POLICY.start(replace(close, unreplaced=6)).chosen == "shrink"


def test_many_lost_nodes_make_waiting_worth_more() -> None:
    """A resize costs as much as ever, but training on with two of eight is worth little."""
    assert POLICY.start(after(6.0, 6.1)).chosen == "shrink"
    assert POLICY.start(replace(after(6.0, 6.1), idle=2, lost=6, pending_slots=6)).chosen == "wait"


def test_near_the_end_of_a_run_nothing_is_waited_for() -> None:
    assert POLICY.start(after(2.0, 2.0)).chosen == "wait"
    assert POLICY.start(replace(after(2.0, 2.0), steps_left=1.0)).chosen == "shrink"


def test_a_wait_costs_a_resize_and_a_recovery_at_most() -> None:
    """Whatever was measured: what the smaller run would have done in that time is worth no more than both."""
    rng = Random("limits")
    for _ in range(2000):
        times = tuple(rng.expovariate(1 / rng.choice((1.0, 10.0, 100.0))) for _ in range(rng.randint(1, 6)))
        known = Measured(
            (rng.uniform(0.5, 30),), (rng.uniform(0.5, 30),), times, {8: 1.0, 7: rng.uniform(0.9, 4)},
            rng.randint(0, 9), rng.uniform(1e3, 1e6),
        )  # fmt: skip
        verdict = POLICY.start(replace(LOST, measured=known, unreplaced=rng.randint(0, 2)))
        if verdict.again_at is not None:
            waited = (verdict.again_at - 100.0) * known.speed(7, 8)
            assert waited <= known.recovery_s[0] + known.resize_s[0] + 1e-9
        assert POLICY.start(replace(LOST, measured=known, now=1e6)).go, "never a dead end"


def test_growth_near_the_end_does_not_pay() -> None:
    facts = ScalingFacts(ScalingSettings(2, 8), 100.0, 1, 0, 0, 7, measured=KNOWN)
    assert POLICY.grow(replace(facts, steps_left=5.0)).chosen == "stay"
    assert POLICY.grow(replace(facts, steps_left=5.0)).reason == (
        "no growth 7 -> 8: it costs 16 node-seconds and would save 6"
    )
    assert POLICY.grow(replace(facts, steps_left=5000.0)).go
    assert POLICY.grow(facts).go


def test_costs_are_told_with_the_facts_behind_them_and_in_money() -> None:
    verdict = POLICY.start(after(1.0, 1.2, 1.4))
    told = table(verdict, KNOWN, 3600.0)
    assert told["chosen"] == "wait"
    assert [row["price"] == pytest.approx(row["lost_node_s"], abs=1e-3) for row in told["options"]] == [True, True]
    assert json.loads(json.dumps(told)) == told
    assert told["facts"]["losses_per_node_hour"] == pytest.approx(3.5 / 24)
    assert "price" not in table(verdict, KNOWN, None)["options"][0]
    assert table(EagerScaling().start(LOST), KNOWN, 1.0) == {}


def leave(run: Scenario, step: int) -> Scenario:
    """All that are inside leave; where snapshots are taken, the nodes have that step."""
    run.left(step)
    if run.state.saved.survey is not None:
        run.do(ev.SnapshotsReported(run.state.saved.surveys, ((f"memory:step-{step:08d}-g0001", step),)))
    return run


def lose(run: Scenario, worker: int, step: int) -> Scenario:
    return leave(run.lose_node(worker), step)


def known_to(run: Scenario) -> Scenario:
    """A first loss and its replacement have been measured: 1 s until it came, 0.1 s to let it in."""
    run.started(3)
    run.do(*[ev.StepTimeMeasured(1, 1.0)])
    lose(run, 0, 5).train().wait(1.0).nodes(1)
    run.do(*(ev.StopPromised(2, worker, 8) for worker in run.state.members)).commit(8)
    leave(run, 8).join().do(ev.FirstStepDone(3, 9), after=2.0)
    return run.do(ev.StepTimeMeasured(3, 1.0))


def test_a_run_shrinks_at_its_first_loss_and_waits_at_its_second_one() -> None:
    run = known_to(Scenario(2, 3, policy="measured"))
    lose(run, 1, 12)
    assert isinstance(run.phase, Waiting)
    (told,) = [note for note in run.acts(act.Note) if note.kind == "waiting"]
    assert told.data["chosen"] == "wait"
    assert {row["option"] for row in told.data["options"]} == {"shrink", "wait"}
    run.wait(0.5).nodes(1)
    assert isinstance(run.phase, Joining)
    assert run.state.world_size == 3


def test_a_run_whose_replacement_does_not_come_continues_smaller_and_says_so() -> None:
    run = known_to(Scenario(2, 3, policy="measured"))
    lose(run, 1, 12).wait(30.0)
    assert isinstance(run.phase, Joining)
    assert run.state.world_size == 2
    (told,) = [note for note in run.acts(act.Note) if note.kind == "scaling"]
    assert told.data["chosen"] == "shrink"
    assert "no replacement has come within" in told.sentence


def test_a_stop_is_not_kept_waiting() -> None:
    run = known_to(Scenario(2, 3, policy="measured", memory=True))
    lose(run, 1, 12)
    assert isinstance(run.phase, Waiting)
    run.do(ev.StopRequested("enough"))
    assert not isinstance(run.phase, Waiting)


def test_growth_that_is_declined_is_said_once() -> None:
    run = Scenario(2, 3, policy="measured", max_steps=14)
    lose(known_to(run).commit(12), 1, 12).wait(30.0)
    run.train().do(ev.StepTimeMeasured(run.state.generation, 1.5))
    said = []
    run.nodes(1)
    said += [note for note in run.acts(act.Note) if note.kind == "scaling"]
    run.do(ev.Tick(), ev.Tick())
    said += [note for note in run.acts(act.Note) if note.kind == "scaling"]
    assert isinstance(run.phase, Training)
    assert [note.data["chosen"] for note in said] == ["stay"]
