"""What NVML tells of this rank's device while it trains: the energy that it has used, why its clocks are lowered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elastic.comm.nvml import NvmlDevice, library

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Clocks follow temperature and load within seconds; a step may be shorter than a question to the driver.
_CLOCKS_EVERY_S = 10.0


class _Meter:
    """Reads with `nvidia-ml-py` where that is installed. Any error of NVML ends the measurement, not the run."""

    what: str

    def __init__(self, device: torch.device) -> None:
        self._nvml = library() if device.type == "cuda" else None
        self._device = self._asked(lambda: NvmlDevice(self._nvml, _identity(device)))

    def _asked(self, ask: Callable[[], _T]) -> _T | None:
        """None once NVML is not there or does not answer."""
        if self._nvml is None:
            return None
        try:
            return ask()
        except self._nvml.NVMLError as error:
            self._nvml = None
            logger.warning("%s of this rank's device is not measured: %s", self.what, error)
            return None


class EnergyMeter(_Meter):
    """By the device's own counter (Volta and later)."""

    what = "the energy"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._before_mj = self._asked(self._read) or 0

    def take(self) -> float:
        """Joules since the last call, or since it was made; 0.0 where they are not known."""
        now = self._asked(self._read)
        if now is None:
            return 0.0
        used, self._before_mj = now - self._before_mj, now
        # The counter begins anew when the driver is loaded again.
        return max(0, used) / 1000.0

    def _read(self) -> int:
        assert self._device is not None
        nvml: Any = self._nvml
        return int(nvml.nvmlDeviceGetTotalEnergyConsumption(self._device.handle))


class ClockMeter(_Meter):
    """Why a device is slower than it could be: what a straggler's peers are not told by times."""

    what = "the clock"

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(device)
        self._clock = clock
        self._next = 0.0
        self._text = ""

    def slowed(self) -> str:
        """For example "temperature, power limit: 1200 of 1980 MHz"; empty where the clocks are not lowered."""
        if self._nvml is not None and self._clock() >= self._next:
            self._next = self._clock() + _CLOCKS_EVERY_S
            self._text = self._asked(self._read) or ""
        return self._text

    def _read(self) -> str:
        assert self._device is not None
        clocks: Any = self._device.clocks()
        reasons = ", ".join(clocks.reasons)
        return f"{reasons}: {clocks.sm_mhz} of {clocks.highest_mhz} MHz" if reasons else ""


def _identity(device: torch.device) -> str:
    """A process may see its devices under other numbers than NVML: CUDA_VISIBLE_DEVICES."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
