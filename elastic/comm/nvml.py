"""What NVML tells of a device: health, clocks. With `nvidia-ml-py`, where that is installed (the extra `gpu`).

Reading creates no context on the device, so that it can come before anything else. What a device or its driver does not
support is left at what stands for "not known".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic.core.policy.device_health import DeviceHealth

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# What came last of that which is read here.
_NEWEST = "nvmlDeviceGetCurrentClocksEventReasons"
_SLOWDOWNS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "temperature",
    "nvmlClocksEventReasonHwThermalSlowdown": "temperature (hardware)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksEventReasonSwPowerCap": "power limit",
}
# Every device under load meets its power limit: no sign of a fault by itself.
_USUAL = frozenset({"power limit"})


@dataclass(frozen=True)
class Clocks:
    """`reasons` why they are lowered, the power limit included. 0: not told."""

    sm_mhz: int
    highest_mhz: int
    reasons: tuple[str, ...]


def library() -> Any | None:
    """`pynvml`, initialised; None where it is not installed, and where it is too old or finds no driver: logged."""
    try:
        # Not a dependency: installed where users want what NVML tells.
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return None
    if not hasattr(pynvml, _NEWEST):
        logger.warning(
            "this nvidia-ml-py has no %s and is not used: install 12.570 or newer (ray-elastic[gpu])", _NEWEST
        )
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.warning("NVML tells nothing of this node's devices: %s", error)
        return None
    return pynvml


class NvmlDevice:
    """One device. `identity` is as in CUDA_VISIBLE_DEVICES: a number, "GPU-..." or "MIG-..."."""

    def __init__(self, nvml: Any, identity: str) -> None:
        """Raises `nvml.NVMLError` where NVML does not know it."""
        self._nvml = nvml
        self._part = identity.startswith("MIG-")
        by_number = identity.isdigit()
        self.handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(identity))
            if by_number
            else nvml.nvmlDeviceGetHandleByUUID(identity.encode())
        )

    @classmethod
    def find(cls, identity: str) -> NvmlDevice | None:
        """None where NVML is not there, or does not know the device; that is logged."""
        nvml = library()
        if nvml is None:
            return None
        try:
            return cls(nvml, identity)
        except nvml.NVMLError as error:
            logger.warning("NVML does not know GPU %s: %s", identity, error)
            return None

    def health(self) -> DeviceHealth:
        if self._part:
            return DeviceHealth(mig=True)
        nvml, handle = self._nvml, self.handle
        name = self._told(nvml.nvmlDeviceGetName, handle, otherwise="")
        rows = self._told(nvml.nvmlDeviceGetRemappedRows, handle, otherwise=(0, 0, 0, 0))
        retired = self._told(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle, otherwise=0)
        uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        reasons = self._reasons()
        return DeviceHealth(
            name=_text(name),
            mig=self._told(nvml.nvmlDeviceGetMigMode, handle, otherwise=[0, 0])[0] == nvml.NVML_DEVICE_MIG_ENABLE,
            recovery=self._recovery(),
            uncorrected_errors=self._told(nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected, otherwise=0),
            remap_pending=bool(rows[2] or retired),
            remap_failed=bool(rows[3]),
            links=self._links(handle),
            usual_links=self._usual_links(name),
            link_recoveries=self._link_recoveries(),
            slowdowns=tuple(reason for reason in reasons if reason not in _USUAL),
        )

    def watch(self) -> Errors | None:
        """None where the device does not tell of its errors."""
        nvml = self._nvml
        kind = nvml.nvmlEventTypeXidCriticalError
        if not self._told(nvml.nvmlDeviceGetSupportedEventTypes, self.handle, otherwise=0) & kind:
            return None
        made = self._told(nvml.nvmlEventSetCreate, otherwise=None)
        if made is None:
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(self.handle, kind, made)
        except nvml.NVMLError as error:
            logger.warning("NVML does not tell of the GPU's errors: %s", error)
            self._told(nvml.nvmlEventSetFree, made, otherwise=None)
            return None
        return Errors(nvml, made)

    def bus_id(self) -> str:
        """Its PCI address in NVML's form, "00000000:3B:00.0"; empty where it is not told."""
        info = self._told(self._nvml.nvmlDeviceGetPciInfo, self.handle, otherwise=None)
        return "" if info is None else _text(info.busId)

    def clocks(self) -> Clocks:
        nvml, kind = self._nvml, self._nvml.NVML_CLOCK_SM
        return Clocks(
            sm_mhz=self._told(nvml.nvmlDeviceGetClockInfo, self.handle, kind, otherwise=0),
            highest_mhz=self._told(nvml.nvmlDeviceGetMaxClockInfo, self.handle, kind, otherwise=0),
            reasons=self._reasons(),
        )

    def _told(self, ask: Callable[..., _T], *arguments: Any, otherwise: _T) -> _T:
        """What a device does not support, or an old driver does not know, is no sign of a fault."""
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as error:
            logger.debug("%s: %s", ask.__name__, error)
            return otherwise

    def _recovery(self) -> int:
        nvml = self._nvml
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return 0
        found: list[Any] = self._told(nvml.nvmlDeviceGetFieldValues, self.handle, [field], otherwise=[])
        # Each value has an error of its own, for drivers that do not know the field.
        return int(found[0].value.uiVal) if found and found[0].nvmlReturn == nvml.NVML_SUCCESS else 0

    def _reasons(self) -> tuple[str, ...]:
        bits = self._told(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, self.handle, otherwise=0)
        return tuple(word for name, word in _SLOWDOWNS.items() if bits & getattr(self._nvml, name))

    def _links(self, handle: Any) -> int:
        return sum(self._told(self._nvml.nvmlDeviceGetNvLinkState, handle, n, otherwise=0) for n in self._numbers())

    def _link_recoveries(self) -> int:
        ask, kind = self._nvml.nvmlDeviceGetNvLinkErrorCounter, self._nvml.NVML_NVLINK_ERROR_DL_RECOVERY
        return sum(self._told(ask, self.handle, number, kind, otherwise=0) for number in self._numbers())

    def _usual_links(self, name: Any) -> int:
        nvml, most = self._nvml, 0
        for number in range(self._told(nvml.nvmlDeviceGetCount, otherwise=0)):
            other = self._told(nvml.nvmlDeviceGetHandleByIndex, number, otherwise=None)
            if other is not None and self._told(nvml.nvmlDeviceGetName, other, otherwise=None) == name:
                most = max(most, self._links(other))
        return most

    def _numbers(self) -> range:
        return range(self._nvml.NVML_NVLINK_MAX_LINKS)


class DeviceLost(RuntimeError):
    """The driver has lost the device, or wants to reset it before anything else."""


class Errors:
    """The errors (Xid) that the driver reports of one device, from the moment that this was made."""

    def __init__(self, nvml: Any, events: Any) -> None:
        self._nvml = nvml
        self._events = events

    def next(self, limit_s: float) -> int | None:
        """The Xid of the next error; None where there is none within `limit_s`. Raises DeviceLost, and
        RuntimeError where NVML tells no more of it."""
        nvml = self._nvml
        try:
            return int(nvml.nvmlEventSetWait(self._events, int(1000 * limit_s)).eventData)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            lost = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
            raise (DeviceLost if lost else RuntimeError)(str(error)) from error

    def close(self) -> None:
        try:
            self._nvml.nvmlEventSetFree(self._events)
        except self._nvml.NVMLError as error:
            logger.debug("a set of NVML events was not freed: %s", error)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
