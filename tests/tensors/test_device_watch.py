"""A device is watched while its worker trains. The fake of NVML is held to the real one by test_nvml."""

from __future__ import annotations

import json
import queue
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import GONE, FakeDevice, FakeNvml

from elastic.comm.nvml import NvmlDevice
from elastic.core.events import DeviceFailed, from_json
from elastic.core.policy.device_health import Fault
from elastic.runtime.worker.actor import WorkerActor
from elastic.runtime.worker.device_watch import DeviceWatch, watch_devices

LIMIT_S = 20.0
PENDING = "memory that failed is replaced only when it is reset: reset the GPU (nvidia-smi -r) or restart the node"


class Bench:
    """`told` is what the watch of `device` has told. `now` is its clock."""

    def __init__(self, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(device))
        self.told: list[Fault] = []
        self.now = 0.0
        found = NvmlDevice.find("0")
        assert found is not None
        self.watch = DeviceWatch(found, self.told.append, lambda: self.now)

    def look(self) -> list[Fault]:
        self.told.clear()
        self.watch.look(0.0)
        return list(self.told)


def test_errors_of_the_device_are_told_and_those_of_programs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(xids=[13, 31, 43, 45, 48, 94, 200])
    bench = Bench(device, monkeypatch)
    assert [bench.look() for _ in range(4)] == [[]] * 4, "a program's own doing"
    assert bench.look() == [Fault("Xid 48: a double-bit error of its memory", unfit=True)]
    assert bench.look() == [Fault("Xid 94: a contained error of its memory", unfit=False)]
    assert bench.look() == [Fault("Xid 200", unfit=False)], "one that this release does not know"
    assert bench.look() == []


def test_what_the_device_says_after_an_error_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error, on a device that has to be reset and on one that does not."""
    device = FakeDevice(xids=[63])
    bench = Bench(device, monkeypatch)
    assert bench.look() == [Fault("Xid 63: a row of its memory is to be remapped", unfit=False)]
    device.xids, device.rows = [63], (0, 1, 1, 0)
    assert bench.look() == [Fault(f"Xid 63: a row of its memory is to be remapped; {PENDING}", unfit=True)]


def test_health_is_read_now_and_then_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device, or a driver, that reports no errors."""
    device = FakeDevice(xids=None)
    bench = Bench(device, monkeypatch)
    device.rows = (0, 1, 1, 0)
    assert bench.look() == [], "the driver is not asked at every turn"
    bench.now = 61.0
    assert bench.look() == [Fault(PENDING, unfit=True)]
    bench.now = 122.0
    assert bench.look() == []


def test_a_device_that_nvml_has_lost_is_told_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(xids=[GONE])
    bench = Bench(device, monkeypatch)
    assert bench.look() == [Fault("NVML tells no more of its errors: GPU is lost", unfit=True)]
    assert bench.look() == []


def test_the_watch_runs_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeDevice(), FakeDevice(xids=[79])))
    told: queue.SimpleQueue[tuple[str, Fault]] = queue.SimpleQueue()
    assert watch_devices((1,), "off", {}, lambda *found: told.put(found)) == []
    assert watch_devices((1,), "evict", {"DS_ACCELERATOR": "cpu"}, lambda *found: told.put(found)) == []
    assert watch_devices((9,), "evict", {}, lambda *found: told.put(found)) == []
    (watch,) = watch_devices((1,), "evict", {}, lambda *found: told.put(found))
    assert told.get(timeout=LIMIT_S) == ("1", Fault("Xid 79: it has fallen off the bus", unfit=True))
    watch.close()


def test_the_controller_is_told_in_the_journals_form() -> None:
    actor = object.__new__(WorkerActor)
    posted: list[Any] = []
    actor._worker, actor._outbox = 3, SimpleNamespace(put=posted.append)  # type: ignore[assignment]
    actor._device_failed("0", Fault("Xid 79: it has fallen off the bus", unfit=True))
    (item,) = posted
    event = from_json(json.loads(json.dumps(item.data)))
    assert (item.kind, event) == ("event", DeviceFailed(3, "0", "Xid 79: it has fallen off the bus", unfit=True))
