"""Scaling policies: what each decides, and that the run obeys the policy that its settings name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args, get_type_hints

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.errors import UsageError
from elastic.core.policy.scaling import EagerScaling, ScalingFacts
from elastic.core.policy.scaling_policies import POLICIES, policy_named
from elastic.core.run import machine
from elastic.core.run.phase import Joining, Training, Waiting
from elastic.core.settings import RunSettings, ScalingSettings

SETTINGS = ScalingSettings(2, 4, gather_s=5.0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_to_the_limits_and_gives_a_reason(name: str) -> None:
    policy = policy_named(name)
    for idle, arriving, pending, members, waited, first, failing in product(
        range(7), (0, 2), (0, 3), (0, 2, 4), (0.0, 9.0), (False, True), (False, True)
    ):
        facts = ScalingFacts(SETTINGS, 100.0, idle, arriving, pending, members, 100.0 - waited, first, failing)
        start, grow = policy.start(facts), policy.grow(facts)
        assert start.reason
        assert grow.reason
        assert not start.go or 2 <= start.size <= min(4, idle)
        assert not grow.go or members < grow.size <= min(4, members + idle)
        assert start.go or start.again_at is None or start.again_at > facts.now or facts.arriving
        assert start == policy.start(facts), "the same facts give the same verdict"


def test_the_names_in_the_settings_are_those_of_the_policies() -> None:
    assert set(get_args(get_type_hints(ScalingSettings)["policy"])) == POLICIES.keys()


def test_an_unknown_policy_is_refused_by_name_before_anything_starts() -> None:
    settings = RunSettings("r", scaling=replace(SETTINGS, policy="hasty"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no scaling policy 'hasty'; there are: eager, measured, patient"):
        machine.initial(settings, 0.0)


def lost_one(run: Scenario) -> Scenario:
    run.started(3)
    return run.lose_node(0).left(5)


def test_a_patient_run_waits_for_a_replacement_where_an_eager_run_continues_smaller() -> None:
    assert isinstance(lost_one(Scenario(2, 3)).phase, Joining)
    run = lost_one(Scenario(2, 3, policy="patient"))
    assert isinstance(run.phase, Waiting)
    assert run.phase.reason == "2 of 3 workers ready; waiting 5 s for more"
    assert isinstance(run.wait(4.0).phase, Waiting)
    assert run.nodes(1).acts(act.BeginGeneration)[-1].members == (1, 2, 3)


def test_a_patient_run_continues_smaller_when_no_replacement_came() -> None:
    run = lost_one(Scenario(2, 3, policy="patient")).wait(6.0)
    assert isinstance(run.phase, Joining)
    assert run.acts(act.BeginGeneration)[-1].members == (1, 2)


def test_a_patient_run_grows_in_one_step() -> None:
    eager = Scenario(2, 4, gather_s=0.5).started(2).nodes(1)
    assert eager.acts(act.ProposeStop)
    run = Scenario(2, 4, gather_s=0.5, policy="patient").do(ev.RunStarted()).nodes(2).wait(1.0).train().nodes(1)
    assert isinstance(run.phase, Training)
    assert run.nodes(1).acts(act.ProposeStop)


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_decides_alike_under_every_policy(name: str) -> None:
    run = lost_one(Scenario(2, 3, policy=name)).wait(6.0)  # type: ignore[arg-type]
    state = machine.initial(RunSettings.from_json(run.state.settings.to_json()), 1000.0)
    for event, now in run.journal:
        state, _ = machine.step(state, event, now)
    assert state == run.state


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_starts_and_grows_by_whole_cells(name: str) -> None:
    policy = policy_named(name)
    for idle, members, waited in product(range(9), (2, 4), (0.0, 9.0)):
        facts = ScalingFacts(SETTINGS, 100.0, idle, 0, 0, members, 100.0 - waited, cells=(2,))
        start, grow = policy.start(facts), policy.grow(facts)
        assert not start.go or start.size in (2, 4)
        assert not grow.go or (grow.size == 4 and members < 4 <= members + idle)
    assert EagerScaling().grow(ScalingFacts(SETTINGS, 0.0, 1, 0, 0, 2, cells=(2,))).reason == "1 idle of 2 for a cell"


def test_a_worker_that_has_no_cell_stands_by_until_another_comes() -> None:
    run = Scenario(2, 4, cell=2)
    run.started(4)
    run.lose_node(0).left(7)
    assert run.acts(act.BeginGeneration)[-1].members == (1, 2)
    assert "continue with 2" in run.state.trouble.incident.action
    assert run.train().acts(act.ProposeStop) == []
    run.nodes(1)
    assert run.acts(act.ProposeStop) or run.acts(act.QuerySnapshots), "the run grows by a whole cell"
