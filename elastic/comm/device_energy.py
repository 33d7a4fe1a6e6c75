"""The energy that this rank's device has used, where it tells: the counter of NVML (NVIDIA, from Volta on)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from elastic.comm.nvml import library

logger = logging.getLogger(__name__)


class EnergyMeter:
    """Reads with `nvidia-ml-py` where that is installed. Any error of NVML ends the measurement, not the run."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._before_mj = 0
        if device.type != "cuda":
            return
        pynvml = library()
        if pynvml is None:
            return
        try:
            # A process may see its devices under other numbers than NVML: CUDA_VISIBLE_DEVICES.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle, self._nvml = pynvml.nvmlDeviceGetHandleByUUID(identity.encode()), pynvml
            self._before_mj = self._read()
        except pynvml.NVMLError as error:
            self._stop(error)

    def take(self) -> float:
        """Joules since the last call, or since it was made; 0.0 where they are not known."""
        if self._nvml is None:
            return 0.0
        try:
            now = self._read()
        except self._nvml.NVMLError as error:
            self._stop(error)
            return 0.0
        used, self._before_mj = now - self._before_mj, now
        # The counter begins anew when the driver is loaded again.
        return max(0, used) / 1000.0

    def _read(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def _stop(self, error: Exception) -> None:
        self._nvml = None
        logger.warning("the energy of this rank's device is not measured: %s", error)
