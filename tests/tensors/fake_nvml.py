"""NVML with devices that a test describes: as the module `pynvml`, and as the C library underneath the real one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

INVALID, NOT_SUPPORTED, NOT_FOUND, TIMEOUT, LOST = 2, 3, 6, 10, 15
XID_EVENT = 0x8
# In place of an error's number: the driver has lost the device.
GONE = -1


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
    bus_id: str | None = "00000000:3B:00.0"
    # What its driver reports next: the numbers of errors, or GONE. None: it reports nothing.
    xids: list[int] | None = field(default_factory=list)


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

    NVML_ERROR_TIMEOUT = TIMEOUT
    NVML_ERROR_GPU_IS_LOST = LOST
    NVML_ERROR_RESET_REQUIRED = 16
    nvmlEventTypeXidCriticalError = XID_EVENT

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(
                {TIMEOUT: "Timeout", LOST: "GPU is lost", NOT_SUPPORTED: "Not Supported"}.get(value, value)
            )
            self.value = value

    def __init__(self, *devices: FakeDevice) -> None:
        super().__init__("pynvml")
        self.devices = devices
        self.sets: list[list[FakeDevice]] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        if index >= len(self.devices):
            raise self.NVMLError(INVALID)
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> FakeDevice:
        for device in self.devices:
            if uuid.decode() == device.uuid or uuid.startswith(b"MIG-"):
                return device
        raise self.NVMLError(NOT_FOUND)

    def nvmlDeviceGetName(self, handle: FakeDevice) -> str:
        return handle.name

    def nvmlDeviceGetPciInfo(self, handle: FakeDevice) -> Any:
        return SimpleNamespace(busId=self._told(handle.bus_id))

    def nvmlDeviceGetSupportedEventTypes(self, handle: FakeDevice) -> int:
        return 0 if handle.xids is None else XID_EVENT

    def nvmlEventSetCreate(self) -> list[FakeDevice]:
        """A set is the devices that are registered in it."""
        self.sets.append([])
        return self.sets[-1]

    def nvmlDeviceRegisterEvents(self, handle: FakeDevice, types: int, events: list[FakeDevice]) -> None:
        assert types == XID_EVENT
        events.append(handle)

    def nvmlEventSetWait(self, events: list[FakeDevice], limit_ms: int) -> Any:
        for device in events:
            if device.xids:
                if device.xids[0] == GONE:
                    raise self.NVMLError(LOST)
                return SimpleNamespace(eventType=XID_EVENT, eventData=device.xids.pop(0))
        # A driver would wait for `limit_ms` first.
        raise self.NVMLError(TIMEOUT)

    def nvmlEventSetFree(self, events: list[FakeDevice]) -> None:
        self.sets.remove(events)

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
            raise self.NVMLError(NOT_SUPPORTED)
        return value


class FakeLibrary:
    """`libnvidia-ml.so` for the real `pynvml`: the same devices, in the C functions' own terms."""

    def __init__(self, *devices: FakeDevice) -> None:
        self._devices = devices
        self._fake = FakeNvml(*devices)
        self._sets: list[list[FakeDevice]] = []

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
        if plain == "nvmlDeviceGetPciInfo_v3":
            return self._place
        if plain.startswith("nvmlEventSet"):
            return getattr(self, f"_{plain}")
        if plain == "nvmlDeviceRegisterEvents":
            return self._register
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

    def _place(self, handle: Any, info: Any) -> int:
        told = self._device(handle).bus_id
        if told is None:
            return NOT_SUPPORTED
        info._obj.busId = told.encode()
        return 0

    def _nvmlEventSetCreate(self, events: Any) -> int:
        self._sets.append(self._fake.nvmlEventSetCreate())
        ctypes.cast(events, ctypes.POINTER(ctypes.c_void_p))[0] = len(self._sets)
        return 0

    def _register(self, handle: Any, types: Any, events: Any) -> int:
        self._fake.nvmlDeviceRegisterEvents(self._device(handle), types.value, self._set(events))
        return 0

    def _nvmlEventSetWait(self, events: Any, data: Any, limit_ms: Any) -> int:
        try:
            told = self._fake.nvmlEventSetWait(self._set(events), limit_ms.value)
        except FakeNvml.NVMLError as error:
            return error.value
        data._obj.eventType, data._obj.eventData = told.eventType, told.eventData
        return 0

    def _nvmlEventSetFree(self, events: Any) -> int:
        self._fake.nvmlEventSetFree(self._set(events))
        return 0

    def _set(self, events: Any) -> list[FakeDevice]:
        return self._sets[(ctypes.cast(events, ctypes.c_void_p).value or 0) - 1]

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
