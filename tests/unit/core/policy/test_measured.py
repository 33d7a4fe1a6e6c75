"""What a run measures about itself: from events, the same in a replay, and known to the next attempt."""

from __future__ import annotations

import json
import math

import pytest
from machine_scenario import Scenario

from elastic.core import events as ev
from elastic.core.policy.measured import Measured, Meter, StepTimes
from elastic.core.run import machine
from elastic.core.typed_json import decode, encode


def test_a_recovery_a_replacement_and_a_resize_are_measured() -> None:
    """Node lost at 1000 s, the generation's end and the next one's first step 2 s and 3 s later; the replacement comes
    10 s after that, and is let in within 1 s."""
    run = Scenario(2, 3).started(3)
    run.lose_node(0).do(*(ev.WorkerLeft(1, worker, 5) for worker in (1, 2)), after=1.0)
    run.join().do(ev.FirstStepDone(2, 6), after=3.0)
    known = run.state.meter.measured
    assert known.recovery_s == pytest.approx((2.0 + 0.02 + 3.0,), abs=0.02)
    assert (known.losses, run.state.meter.missing) == (1, (pytest.approx(run.now - known.recovery_s[0], abs=0.02),))
    run.wait(10.0).nodes(1)
    assert run.state.meter.measured.replacement_s == pytest.approx((15.05,), abs=0.05)
    run.do(*(ev.StopPromised(2, worker, 8) for worker in (1, 2))).commit(8).left(8)
    run.join().do(ev.FirstStepDone(3, 9), after=1.0)
    assert run.state.meter.measured.resize_s == pytest.approx((1.1,), abs=0.05)
    assert run.state.meter.missing == ()


def test_time_without_enough_nodes_is_not_part_of_a_recovery() -> None:
    run = Scenario(3, 3).started(3)
    run.lose_node(0).left(5)
    run.wait(500.0).nodes(1)
    run.train()
    assert run.state.meter.measured.recovery_s[0] < 1.0
    assert run.state.meter.measured.replacement_s == pytest.approx((500.0,), abs=0.2)


def test_a_node_that_leaves_with_notice_is_no_loss() -> None:
    run = Scenario(2, 3).started(3)
    run.do(ev.NodesDraining((("node-0", run.now + 5.0),))).do(ev.SlotLost(0, "gone"))
    assert run.state.meter.measured.losses == 0


def test_a_restarted_worker_is_no_replacement() -> None:
    run = Scenario(2, 4).started(4)
    run.lose_node(0).left(5)
    run.lose_node(1).nodes(1)
    assert len(run.state.meter.measured.replacement_s) == 1
    newest = max(run.state.fleet.workers)
    run.do(ev.WorkerDied(newest, "killed"))
    run.do(ev.WorkerReady(max(run.state.fleet.workers), 1, "host"))
    assert len(run.state.meter.measured.replacement_s) == 1
    assert len(run.state.meter.missing) == 1


def test_a_replacement_that_is_lost_before_it_is_ready_has_not_come() -> None:
    run = Scenario(2, 3).started(3)
    run.lose_node(0).left(5)
    at = run.state.meter.missing
    run.do(ev.SlotPlaced(3, "node-3")).do(ev.SlotLost(3, "gone again"))
    assert run.state.meter.missing[:1] == at
    assert run.state.meter.measured.replacement_s == ()


def test_node_seconds_are_those_of_placed_slots() -> None:
    run = Scenario(2, 3).started(3)
    run.wait(100.0).lose_node(0)
    assert run.state.meter.measured.node_s == pytest.approx(3 * 100.0, rel=0.2)


@pytest.mark.parametrize(
    ("losses", "low", "high"),
    # Garwood's exact limits: half the chi-squared quantiles 0.05 at 2k and 0.95 at 2k + 2 degrees.
    [(0, 0.0, 2.9957), (1, 0.0513, 4.7439), (3, 0.8177, 7.7537), (10, 5.4254, 16.9622)],
)
def test_the_interval_of_the_rate_of_losses(losses: int, low: float, high: float) -> None:
    found = Measured(losses=losses, node_s=1.0).losses_per_node_s_interval
    assert found == (pytest.approx(low, rel=0.02, abs=0.03), pytest.approx(high, rel=0.02))
    assert found[0] <= Measured(losses=losses, node_s=1.0).losses_per_node_s <= found[1]
    assert Measured().losses_per_node_s_interval == (0.0, math.inf)


def test_speed_is_measured_and_linear_where_it_is_not() -> None:
    assert Measured(step_s={3: 1.25, 4: 1.0}).speed(3, 4) == pytest.approx(0.8)
    assert Measured(step_s={4: 1.0}).speed(3, 4) == pytest.approx(0.75)
    assert Measured(step_s={3: 0.9, 4: 1.0}).speed(3, 4) == 1.0


def test_steps_are_told_once_per_size_and_again_when_they_change() -> None:
    times = StepTimes()
    told = [times.add(1, 2.0, None) for _ in range(5)]
    assert told == [None] * 4 + [2.0]
    assert [times.add(1, 2.1, 2.0) for _ in range(60)] == [None] * 60
    assert 3.0 in [times.add(1, 3.0, 2.0) for _ in range(60)]
    assert [times.add(2, 5.0, None) for _ in range(5)][-1] == 5.0


def test_a_later_attempt_knows_what_an_earlier_one_has_measured() -> None:
    run = Scenario(2, 3).started(3)
    run.lose_node(0).left(5)
    run.train().do(ev.StepTimeMeasured(2, 0.5)).nodes(1)
    measured = run.state.meter.measured
    assert measured.step_s == {2: 0.5}
    told = json.loads(json.dumps(encode(measured)))
    state = machine.initial(run.state.settings, 9000.0)
    event = ev.from_json(json.loads(json.dumps(ev.to_json(ev.RunStarted(measured=told)))))
    assert machine.step(state, event, 9000.0)[0].meter.measured == measured
    other = ev.RunStarted(measured={"what": "another release"})
    assert machine.step(state, other, 9000.0)[0].meter.measured == Measured()
    assert decode(Meter, json.loads(json.dumps(encode(run.state.meter)))) == run.state.meter


def test_a_step_that_takes_no_time_is_not_believed() -> None:
    run = Scenario(2, 3).started(3).do(ev.StepTimeMeasured(1, 0.0))
    assert run.state.meter.measured.step_s == {}
