"""NVML with devices that a test describes: as the module `pynvml`, and as the C library underneath the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

NOT_SUPPORTED, NOT_FOUND = 3, 6


@dataclass
class FakeDevice:
    """None: the device does not support the question."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-0"
    mig: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    retired_pending: int | None = None
    uncorrected: int | None = 0
    recovery: int | None = 0
    links: list[int] = field(default_factory=lambda: [1] * 18)
    link_recoveries: int = 0
    reasons: int | None = 0
    sm_mhz: int | None = 1980
    highest_mhz: int | None = 1980


class FakeNvml(ModuleType):
    """The part of `pynvml` that is used here. Handles are the devices."""

    NVML_SUCCESS = 0
    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_ERROR_DL_RECOVERY = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_CLOCK_SM = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    class NVMLError(Exception):
        pass

    def __init__(self, *devices: FakeDevice) -> None:
        super().__init__("pynvml")
        self.devices = devices

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        if index >= len(self.devices):
            raise self.NVMLError("Invalid Argument")
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> FakeDevice:
        for device in self.devices:
            if uuid.decode() == device.uuid or uuid.startswith(b"MIG-"):
                return device
        raise self.NVMLError("Not Found")

    def nvmlDeviceGetName(self, handle: FakeDevice) -> str:
        return handle.name

    def nvmlDeviceGetMigMode(self, handle: FakeDevice) -> list[int]:
        return [self._told(handle.mig), 0]

    def nvmlDeviceGetRemappedRows(self, handle: FakeDevice) -> tuple[int, ...]:
        return self._told(handle.rows)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: FakeDevice) -> int:
        return self._told(handle.retired_pending)

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeDevice, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0), "of those that were not corrected, since the driver was loaded"
        return self._told(handle.uncorrected)

    def nvmlDeviceGetFieldValues(self, handle: FakeDevice, fields: list[int]) -> list[Any]:
        assert fields == [230]
        known = handle.recovery is not None
        value = SimpleNamespace(uiVal=handle.recovery or 0)
        return [SimpleNamespace(nvmlReturn=0 if known else NOT_SUPPORTED, value=value)]

    def nvmlDeviceGetNvLinkState(self, handle: FakeDevice, link: int) -> int:
        return self._told(handle.links[link] if link < len(handle.links) else None)

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: FakeDevice, link: int, kind: int) -> int:
        assert kind == 1
        return self._told((handle.link_recoveries if link == 0 else 0) if link < len(handle.links) else None)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: FakeDevice) -> int:
        return self._told(handle.reasons)

    def nvmlDeviceGetClockInfo(self, handle: FakeDevice, kind: int) -> int:
        assert kind == 1
        return self._told(handle.sm_mhz)

    def nvmlDeviceGetMaxClockInfo(self, handle: FakeDevice, kind: int) -> int:
        assert kind == 1
        return self._told(handle.highest_mhz)

    def _told(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value


class FakeLibrary:
    """`libnvidia-ml.so` for the real `pynvml`: the same devices, in the C functions' own terms."""

    def __init__(self, *devices: FakeDevice) -> None:
        self._devices = devices
        self._fake = FakeNvml(*devices)

    def __getattr__(self, name: str) -> Callable[..., int]:
        plain = name.removesuffix("_v2")
        if plain in ("nvmlInit", "nvmlInitWithFlags"):
            return lambda *_: 0
        if plain in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
            return lambda key, handle: self._handle(getattr(self._fake, plain), key, handle)
        if plain == "nvmlDeviceGetCount":
            return lambda count: _put(count, len(self._devices))
        if plain == "nvmlDeviceGetName":
            return self._name
        if plain == "nvmlDeviceGetFieldValues":
            return self._fields
        return lambda handle, *rest: self._ask(plain, handle, rest)

    def _handle(self, ask: Callable[[Any], FakeDevice], key: Any, handle: Any) -> int:
        key = getattr(key, "value", key)
        try:
            found = ask(key)
        except FakeNvml.NVMLError:
            return NOT_FOUND
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = self._devices.index(found) + 1
        return 0

    def _device(self, handle: Any) -> FakeDevice:
        return self._devices[(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1]

    def _name(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self._device(handle).name.encode()
        return 0

    def _fields(self, handle: Any, count: Any, values: Any) -> int:
        device, (value,) = self._device(handle), values._obj
        assert value.fieldId == 230
        value.nvmlReturn = 0 if device.recovery is not None else NOT_SUPPORTED
        value.value.uiVal = device.recovery or 0
        return 0

    def _ask(self, name: str, handle: Any, rest: tuple[Any, ...]) -> int:
        given = [each for each in rest if not hasattr(each, "_obj")]
        targets = [each for each in rest if hasattr(each, "_obj")]
        try:
            found = getattr(self._fake, name)(self._device(handle), *(getattr(each, "value", each) for each in given))
        except FakeNvml.NVMLError:
            return NOT_SUPPORTED
        for target, value in zip(targets, found if isinstance(found, (list, tuple)) else [found], strict=True):
            _put(target, value)
        return 0


def _put(target: Any, value: int) -> int:
    target._obj.value = value
    return 0
