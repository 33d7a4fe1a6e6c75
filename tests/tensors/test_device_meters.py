"""The meters against NVML's interface: values that grow, begin anew, change, fail, or are not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nvml import FakeDevice, FakeNvml

from elastic.comm.device_meters import ClockMeter, EnergyMeter

CUDA = torch.device("cuda", 1)


class Failed(Exception):
    """NVMLError."""


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the counter shows at each reading, in millijoules; an exception is raised."""
    shown: list[Any] = []
    nvml = ModuleType("pynvml")

    def read(handle: str) -> int:
        assert handle == "handle of GPU-ab-1"
        value = shown.pop(0)
        if isinstance(value, Exception):
            raise value
        return int(value)

    vars(nvml).update(
        NVMLError=Failed,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid.decode()}",
        nvmlDeviceGetTotalEnergyConsumption=read,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"ab-{device.index}"))
    return shown


def test_what_is_used_between_two_readings(counter: list[Any]) -> None:
    counter += [1_000_000, 1_002_500, 1_002_500, 40, 1040]
    meter = EnergyMeter(CUDA)
    assert [meter.take() for _ in range(4)] == [2.5, 0.0, 0.0, 1.0], "the driver was loaded again before the third"


def test_an_error_ends_the_measurement_and_not_the_run(counter: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    counter += [1000, Failed("GPU is lost")]
    meter = EnergyMeter(CUDA)
    assert [meter.take(), meter.take()] == [0.0, 0.0]
    assert [record.getMessage() for record in caplog.records] == [
        "the energy of this rank's device is not measured: GPU is lost"
    ]
    counter += [Failed("not supported")]
    assert EnergyMeter(CUDA).take() == 0.0


def test_nothing_is_told_without_a_device_or_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyMeter(CUDA).take() == 0.0
    assert EnergyMeter(torch.device("cpu")).take() == 0.0


def test_why_a_device_is_slow_is_looked_at_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    device, now = FakeDevice(uuid="GPU-ab-1"), [0.0]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(device))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"ab-{device.index}"))
    meter = ClockMeter(CUDA, lambda: now[0])
    assert meter.slowed() == ""
    device.reasons, device.sm_mhz = 0x4 | 0x20, 1200
    now[0] = 9.0
    assert meter.slowed() == "", "the driver is not asked at every step"
    now[0] = 11.0
    assert meter.slowed() == "temperature, power limit: 1200 of 1980 MHz"
    device.reasons, now[0] = 0, 22.0
    assert meter.slowed() == ""


def test_without_a_device_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClockMeter(torch.device("cpu")).slowed() == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ClockMeter(CUDA).slowed() == ""
