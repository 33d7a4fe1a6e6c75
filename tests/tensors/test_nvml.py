"""What is read of NVML, against a fake and against the real `nvidia-ml-py` over a library of the same devices."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_nvml import GONE, FakeDevice, FakeLibrary, FakeNvml

from elastic.comm import nvml
from elastic.comm.nvml import Clocks, DeviceLost, Errors, NvmlDevice
from elastic.core.policy.device_health import DeviceHealth, unfit

H100 = "NVIDIA H100 80GB HBM3"
Install = Callable[..., Any]


@pytest.fixture(params=["fake", "real"])
def install(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that makes `pynvml` know the devices that it is given."""

    def fake(*devices: FakeDevice) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*devices))

    def real(*devices: FakeDevice) -> None:
        pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
        library = FakeLibrary(*devices)
        monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda name: getattr(library, name))

    return fake if request.param == "fake" else real


def health(identity: str = "0") -> DeviceHealth:
    device = NvmlDevice.find(identity)
    assert device is not None
    return device.health()


def test_a_good_device_among_good_devices(install: Install) -> None:
    install(FakeDevice(), FakeDevice(uuid="GPU-1"))
    assert health() == health("GPU-1") == DeviceHealth(H100, links=18, usual_links=18)


def test_everything_that_a_device_tells(install: Install) -> None:
    told = FakeDevice(
        mig=1, rows=(1, 2, 1, 1), uncorrected=4, recovery=2, links=[1] * 17 + [0], link_recoveries=5,
        reasons=0x4 | 0x40, sm_mhz=1200,
    )  # fmt: skip
    install(FakeDevice(), told, FakeDevice(name="NVIDIA L4", links=[]))
    assert health("1") == DeviceHealth(
        H100, mig=True, recovery=2, uncorrected_errors=4, remap_pending=True, remap_failed=True, links=17,
        usual_links=18, link_recoveries=5, slowdowns=("temperature (hardware)",),
    )  # fmt: skip
    device = NvmlDevice.find("1")
    assert device is not None
    assert device.clocks() == Clocks(1200, 1980, ("temperature (hardware)", "power limit"))


def test_a_device_that_supports_none_of_it_is_fit(install: Install) -> None:
    """A card without ECC, MIG and NVLink, or an old driver."""
    silent = FakeDevice("NVIDIA L4", mig=None, rows=None, uncorrected=None, recovery=None, links=[], reasons=None)
    silent.sm_mhz = silent.highest_mhz = None
    install(silent)
    assert health() == DeviceHealth("NVIDIA L4")
    device = NvmlDevice.find("0")
    assert device is not None
    assert device.clocks() == Clocks(0, 0, ())


def test_where_a_device_is_plugged_in(install: Install) -> None:
    install(FakeDevice(bus_id="00000000:AF:00.0"), FakeDevice(bus_id=None))
    found = [NvmlDevice.find(number) for number in ("0", "1")]
    assert [device.bus_id() for device in found if device is not None] == ["00000000:AF:00.0", ""]


def watched(identity: str = "0") -> Errors | None:
    device = NvmlDevice.find(identity)
    assert device is not None
    return device.watch()


def test_errors_that_a_driver_reports_come_one_by_one(install: Install) -> None:
    sick, other = FakeDevice(), FakeDevice(uuid="GPU-1", xids=[13])
    install(sick, other)
    errors = watched()
    assert errors is not None
    assert errors.next(0.01) is None
    sick.xids = [63, 48]
    assert [errors.next(0.01) for _ in range(3)] == [63, 48, None]
    sick.xids = [GONE]
    with pytest.raises(DeviceLost, match="GPU is lost"):
        errors.next(0.01)
    errors.close()
    assert other.xids == [13], "another device's errors are its worker's"


def test_a_device_that_reports_no_errors_is_not_watched(install: Install) -> None:
    install(FakeDevice(xids=None))
    assert watched() is None


def test_pages_that_are_retired_at_the_next_reset_count_as_rows_do(install: Install) -> None:
    install(FakeDevice("Tesla V100-SXM2", rows=None, retired_pending=1, links=[]))
    assert health().remap_pending


def test_a_part_of_a_device_is_refused(install: Install) -> None:
    install(FakeDevice())
    assert "switch MIG off" in str(unfit(health("MIG-3f2a")))


def test_a_device_that_nvml_does_not_know_is_named_and_not_judged(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(FakeDevice())
    assert NvmlDevice.find("7") is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["NVML does not know GPU 7"]


def test_without_the_library_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlDevice.find("0") is None


def test_an_old_library_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """pynvml of years ago, which others have brought: an AttributeError would end the worker."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert NvmlDevice.find("0") is None
    assert "install 12.570 or newer" in caplog.text


def test_without_a_driver_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")
    with caplog.at_level(logging.WARNING):
        assert nvml.library() is None
    assert caplog.records[0].getMessage().startswith("NVML tells nothing of this node's devices:")
