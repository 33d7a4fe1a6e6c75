"""What memory this process has, and what of it a generation has taken at most."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch

# Linux's: Documentation/filesystems/proc.rst.
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
# What the process had before any code of the user's ran in it: libraries.
_before_bytes = 0


class MemoryUse(NamedTuple):
    """Without what others use: other processes on the device, its context and communicators; in host memory, what
    the process had before the user's code."""

    limit_bytes: int
    peak_bytes: int


def note_process() -> None:
    """Before any code of the user's has run in this process."""
    global _before_bytes
    _before_bytes = _resident("VmRSS")


def begin(device: torch.device) -> None:
    """Count the peak from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # Without it the peak is that of the process's life, which is no less.
        with contextlib.suppress(OSError):
            _CLEAR_REFS.write_text(_RESET_PEAK)


def memory_use(device: torch.device, worker_bytes: int | None) -> MemoryUse | None:
    """Since `begin`; None where nobody says how much there is. `worker_bytes`: what a worker has of the host's memory,
    if that is known.

    On a device the peak is of what tensors took, not of what torch has reserved: that grows to whatever is there.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = max(0, total - free - torch.cuda.memory_reserved(device))
        return MemoryUse(total - others, torch.cuda.max_memory_allocated(device))
    peak = _resident("VmHWM")
    if worker_bytes is None or not peak:
        return None
    return MemoryUse(max(0, worker_bytes - _before_bytes), max(0, peak - _before_bytes))


def _resident(field: str) -> int:
    """0 where the system does not say it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
