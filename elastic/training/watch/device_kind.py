"""Which devices compute alike."""

from __future__ import annotations

import platform

import torch

from elastic.training import rng


def kind_of(device: torch.device) -> float:
    """A number for the kind of device: other kinds round in other ways. So do other numbers of threads."""
    cpu = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    named: tuple[str | int, ...] = (torch.cuda.get_device_name(device),) if device.type == "cuda" else cpu
    # Exact as a float, also when the number of forward passes is added.
    return float(rng.derive(torch.__version__, *named) >> 12 << 1)
