"""Is a node as fast as the others: fits, limits that the fleet sets, and what the run does about a slow node."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from machine_scenario import Scenario

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.policy.calibration import Calibration, described, judge, remembered
from elastic.core.settings import CalibrationSettings

SETTINGS = CalibrationSettings("refuse")
SIZES = (1 << 10, 256 << 10, 4 << 20)


def node(
    name: str,
    rng: Random | None = None,
    slower: float = 1.0,
    beta: float = 1e-9,
    link: str = "same zone",
    **rates: float,
) -> Calibration:
    """Scattered by 2 %; `slower` divides the rates that are not given."""

    def scatter() -> float:
        return rng.uniform(0.98, 1.02) if rng is not None else 1.0

    known = {"gemm": 1e12, "memory": 1e10, "disk": 1e9}
    found = tuple((key, rates.get(key, rate / slower) * scatter()) for key, rate in known.items())
    points = tuple((size, (50e-6 + beta * size) * scatter()) for size in SIZES)
    return Calibration(name, found, "partner", link, points, points)


def fleet(count: int = 8) -> list[Calibration]:
    rng = Random("fleet")
    return [node(f"n{number}", rng) for number in range(count)]


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 1e-10), (1e-3, 1e-8), (5e-6, 1e-9), (0.02, 5e-8)])
def test_latency_and_bandwidth_are_fitted_within_a_tenth(alpha: float, beta: float) -> None:
    rng = Random(f"{alpha}")
    points = tuple((size, (alpha + beta * size) * rng.uniform(0.97, 1.03)) for size in SIZES)
    hop = Calibration("n", (), "p", "other", points, points).hops["sending"]
    assert hop.alpha_s == pytest.approx(alpha, rel=0.1)
    assert hop.beta_s_per_byte == pytest.approx(beta, rel=0.1)


def test_a_node_like_the_others_is_healthy() -> None:
    rng = Random("healthy")
    for number in range(200):
        assert judge(node(f"new{number}", rng), fleet(), SETTINGS).state == "healthy"


def test_slower_and_much_slower_nodes_are_told_apart_with_the_reason() -> None:
    slow = judge(node("n", gemm=0.7e12), fleet(), SETTINGS)
    assert slow.state == "slow"
    assert slow.reasons == ("gemm 1.43 times as slow as the median of 8 others",)
    refused = judge(node("n", memory=3e9), fleet(), SETTINGS)
    assert refused.state == "refused"
    assert refused.reasons[0].startswith("memory 3.3")
    wire = judge(node("n", beta=4e-9), fleet(), SETTINGS)
    assert wire.state == "refused"
    assert {reason.split(" ")[0] for reason in wire.reasons} == {"sending", "receiving"}


def test_a_slow_disk_alone_refuses_no_node() -> None:
    assert judge(node("n", disk=1e7), fleet(), SETTINGS).state == "slow"


def test_connections_are_compared_within_their_class() -> None:
    far = node("n", beta=20e-9, link="other")
    assert judge(far, fleet(), SETTINGS).state == "healthy"
    others = [node(f"far{number}", Random(f"{number}"), beta=20e-9, link="other") for number in range(3)]
    assert judge(node("n", beta=60e-9, link="other"), [*fleet(), *others], SETTINGS).state == "refused"


def test_what_scatters_in_the_fleet_is_no_fault_of_a_node() -> None:
    rng = Random("scattered")
    wild = [node(f"n{number}", slower=rng.uniform(0.5, 4)) for number in range(20)]
    assert judge(node("n", slower=3), wild, SETTINGS).state == "healthy"


def test_too_few_others_say_nothing() -> None:
    assert judge(node("n", slower=100), fleet(1), SETTINGS).state == "healthy"


def test_of_each_node_the_newest_is_remembered() -> None:
    known: tuple[Calibration, ...] = ()
    for number in range(300):
        known = remembered(known, node(f"n{number % 150}"))
    assert len(known) == 100
    assert known[-1].node == "n149"


def joined(run: Scenario, slot: int, **rates: float) -> Scenario:
    """The slot's node joins and is measured; its worker comes up after that."""
    name = f"node-{slot}"
    run.do(ev.SlotPlaced(slot, name))
    last = list(run.last)
    own = node(name, **rates)
    run.do(ev.NodeMeasured(name, own.rates, own.partner, own.link, own.sent, own.received))
    last += run.last
    starting = [w for w in run.state.fleet.workers.starting if run.state.fleet.workers[w].slot == slot]
    run.do(*(ev.WorkerReady(worker, 1, "host") for worker in starting))
    run.last = last + run.last
    return run


def calibrated(policy: Any = "refuse", low: int = 2) -> Scenario:
    run = Scenario(low, 4, calibration=CalibrationSettings(policy)).do(ev.RunStarted())
    for slot in range(3):
        joined(run, slot)
    return run.wait(10.0).train()


def told(run: Scenario) -> list[act.Note]:
    return [note for note in run.acts(act.Note) if note.kind == "calibration"]


def test_a_newcomer_is_measured_with_an_idle_node_and_never_with_one_that_trains() -> None:
    run = Scenario(2, 4, calibration=CalibrationSettings("report")).do(ev.RunStarted())
    assert joined(run, 0).acts(act.MeasureNode) == [act.MeasureNode("node-0", ())]
    assert joined(run, 1).acts(act.MeasureNode) == [act.MeasureNode("node-1", ("node-0",))]
    run.wait(10.0).train()
    assert joined(run, 2).acts(act.MeasureNode) == [act.MeasureNode("node-2", ())]


def test_without_the_setting_nothing_is_measured() -> None:
    assert Scenario(2, 4).do(ev.RunStarted(), ev.SlotPlaced(0, "n")).acts(act.MeasureNode) == []


def test_a_refused_node_is_left_and_not_asked_for_again_for_a_while() -> None:
    run = joined(calibrated(), 3, gemm=1e11)
    (verdict,) = told(run)
    assert verdict.data["state"] == "refused"
    assert [drop.slot for drop in run.acts(act.ReleaseSlot)] == [3]
    assert run.acts(act.RequestSlot)[0].avoid == ("node-3",)
    assert run.state.world_size == 3


def test_reporting_leaves_no_node() -> None:
    run = joined(calibrated("report"), 3, gemm=1e11)
    assert told(run)[0].data["state"] == "refused"
    assert run.acts(act.ReleaseSlot) == []


def test_a_refused_node_that_the_run_needs_is_kept() -> None:
    run = Scenario(4, 4, calibration=SETTINGS).do(ev.RunStarted())
    for slot in range(3):
        joined(run, slot)
    joined(run, 3, gemm=1e11)
    assert run.acts(act.ReleaseSlot) == []
    assert "node node-3 is kept: 3 workers are on others" in run.said()


def test_a_node_that_could_not_be_measured_is_used_and_reported() -> None:
    run = calibrated()
    run.do(ev.SlotPlaced(3, "node-3"), ev.NodeMeasured("node-3", failed="no answer within 30 s"))
    assert told(run)[0].sentence == "node node-3 could not be measured: no answer within 30 s"
    assert 3 in run.state.fleet.slots


def test_a_calibration_in_words() -> None:
    assert described(node("n")) == (
        "gemm 1e+03 GFLOP/s, memory 10 GB/s, disk 1 GB/s; same zone, node partner: sending 50 us and 1 GB/s, "
        "receiving 50 us and 1 GB/s"
    )
    assert described(Calibration("n", (("gemm", 5e10),))) == "gemm 50 GFLOP/s"


def test_figures_of_zero_are_no_reason_to_fail() -> None:
    """Whatever a node reports: a node without any speed is refused, and times that cannot be are left out."""
    assert judge(node("n", gemm=0.0), fleet(), SETTINGS).state == "refused"
    run = calibrated()
    zero = ((1024, 0.0), (4096, 0.0))
    run.do(ev.SlotPlaced(3, "node-3"), ev.NodeMeasured("node-3", (("gemm", 0.0),), "node-0", "other", zero, zero))
    assert told(run)[0].data["state"] == "refused"
