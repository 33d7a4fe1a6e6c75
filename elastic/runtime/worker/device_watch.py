"""Watches the device of a worker while it trains: an error that its driver reports (Xid) may say nothing to CUDA."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from elastic.comm.nvml import DeviceLost, Errors, NvmlDevice
from elastic.core.policy.device_health import Fault, fault

logger = logging.getLogger(__name__)

# The driver wakes the thread at an error; between two errors health is read now and then: reading takes milliseconds.
_WAIT_S = 5.0
_HEALTH_EVERY_S = 60.0


class DeviceWatch:
    """Of one device. `tell` is called for each fault that is not the one told last, on the watch's own thread."""

    def __init__(
        self, device: NvmlDevice, tell: Callable[[Fault], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._tell = tell
        self._clock = clock
        self._errors: Errors | None = device.watch()
        self._next = clock() + _HEALTH_EVERY_S
        self._last: Fault | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Watch on a thread of its own until the process ends."""
        threading.Thread(target=self._run, name="elastic-device", daemon=True).start()

    def look(self, limit_s: float) -> None:
        """Wait for an error for at most `limit_s`, and tell what it means; read the health when it is due."""
        xid = None
        try:
            if self._errors is not None:
                xid = self._errors.next(limit_s)
        except RuntimeError as error:
            self._errors = None
            self._note(Fault(f"NVML tells no more of its errors: {error}", unfit=isinstance(error, DeviceLost)))
        if xid is None and self._clock() < self._next:
            return
        self._next = self._clock() + _HEALTH_EVERY_S
        if xid is not None:
            logger.warning("the driver reports Xid %d of this worker's GPU", xid)
        found = fault(xid, self._device.health())
        if found is not None:
            self._note(found)

    def close(self) -> None:
        """The thread ends after at most one more look."""
        self._closed.set()

    def _note(self, found: Fault) -> None:
        if found != self._last:
            self._last = found
            self._tell(found)

    def _run(self) -> None:
        # Where no driver waits for an error, the thread does.
        while not self._closed.wait(_WAIT_S if self._errors is None else 0.0):
            self.look(_WAIT_S)


def watch_devices(
    given: Sequence[int | str],
    policy: Literal["off", "report", "evict"],
    environment: Mapping[str, str],
    tell: Callable[[str, Fault], None],
) -> list[DeviceWatch]:
    """Begin to watch the reserved GPUs (`given`, `environment`: see `device.check_device`), unless the job does not
    want it, or NVML is not there. `tell` gets a GPU's id and its fault."""
    if policy == "off" or environment.get("DS_ACCELERATOR") == "cpu":
        return []
    found = ((gpu, NvmlDevice.find(gpu)) for gpu in map(str, given))
    watches = [DeviceWatch(device, partial(tell, gpu)) for gpu, device in found if device is not None]
    for watch in watches:
        watch.start()
    return watches
