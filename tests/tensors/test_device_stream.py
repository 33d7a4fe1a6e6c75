"""How long snapshots delay a device: a simulated one that is behind the thread that enqueues its work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_device import Device, SimulatedStream

from elastic.comm import device_stream
from elastic.comm.device_stream import DelayClock
from elastic.core.data.step_plan import StepPlan
from elastic.core.data.steps import StepReport
from elastic.core.generation_spec import GenerationSpec
from elastic.training.local import SilentCoordinator
from elastic.training.saving.requests import SaveRequests
from elastic.training.saving.snapshots import Snapshots
from elastic.training.scope import GenerationScope
from elastic.training.step_loop import StepLoop
from elastic.training.user.state import State

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()
    monkeypatch.setattr(SimulatedStream, "simulated", simulated, raising=False)
    monkeypatch.setattr(device_stream, "DeviceStream", SimulatedStream)
    monkeypatch.setattr("time.perf_counter", lambda: simulated.now)
    return simulated


def test_a_stream_that_waits_for_copies_is_delayed_and_the_thread_is_not(device: Device) -> None:
    clock = DelayClock(CUDA)
    device.work(0.5)
    with clock.delay():
        device.wait_until(device.now + 0.75)
    assert clock.take() == 0.0, "the device has not passed it, and nobody waits for it"
    device.work(0.1)
    device.synchronize()
    assert clock.take() == pytest.approx(0.25)
    assert clock.take() == 0.0, "each delay counts once"


def test_copies_that_were_made_in_time_delay_nothing(device: Device) -> None:
    clock = DelayClock(CUDA)
    device.work(0.5)
    with clock.delay():
        device.wait_until(device.now + 0.25)
    device.synchronize()
    assert clock.take() == 0.0


def test_what_the_thread_took_itself_is_not_counted_twice(device: Device) -> None:
    """Copies that cannot wait are enqueued while the thread prepares them; it returns before they are made."""
    clock = DelayClock(CUDA)
    with clock.delay():
        device.work(2.0)
        device.now += 0.5
    device.synchronize()
    assert clock.take() == pytest.approx(1.5)


def test_the_cpu_has_no_events() -> None:
    clock = DelayClock(torch.device("cpu"))
    with clock.delay():
        pass
    assert clock.take() == 0.0


class Coordinator(SilentCoordinator):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step_done(self, report: StepReport) -> None:
        self.reports.append(report)


def test_a_steps_report_has_the_wait_of_the_stream_for_the_snapshot_before(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of step 1 are made during step 2, whose update waits for them on the device."""
    coordinator = Coordinator()
    scope = GenerationScope(GenerationSpec("run", 1, 0, 1), coordinator, torch.device("cpu"))
    state: Any = type("State", (), {"before_step": lambda self: None})()
    snapshots = Snapshots(scope, state, dict)
    snapshots._delays = DelayClock(CUDA)
    copied_at = [0.0]

    def fence() -> float:
        device.wait_until(copied_at[0])
        return 0.0

    monkeypatch.setattr(snapshots._copier, "fence", fence)
    plan = StepPlan(4, 4, 1, 0, 100, None, 1)
    steps = StepLoop(scope, plan, snapshots, SaveRequests(scope, State(), snapshots, apart=False), dict)
    for number in (1, 2):
        assert steps.advance()
        assert steps.progress is not None
        begun = device.now
        device.work(1.0)
        steps.before_update()
        device.work(0.125)
        # The loss is read.
        device.synchronize()
        steps.progress.hand_out()
        steps.progress.finish_batch()
        steps.step_finished(StepReport(number, 0.0, (), 0, device.now - begun), True)
        copied_at[0] = device.now + 1.5
    steps._close_step()
    assert [(report.duration_s, report.save_stall_s) for report in coordinator.reports] == [(1.125, 0.0), (1.625, 0.5)]
