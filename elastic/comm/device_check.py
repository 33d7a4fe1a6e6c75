"""Whether the device still works: asked after a failure, since an error of the device can look like one of a peer."""

from __future__ import annotations

import time

import torch

from elastic.comm.failures import is_of_device

# The kernel takes microseconds. One that does not end waits behind others, which says nothing about the device.
_LIMIT_S = 1.0
_POLL_S = 0.001


def device_error(device: torch.device, limit_s: float = _LIMIT_S) -> BaseException | None:
    """The error that a tiny kernel on `device` raises; None where it runs, or does not end within `limit_s`.

    Most CUDA errors stay with the process, so the kernel raises what a collective before it was lost to. It runs on a
    stream of its own: the usual one may stand behind a collective that never ends. Always None for the CPU.
    """
    if device.type == "cpu":
        return None
    try:
        deadline = time.monotonic() + limit_s
        stream = torch.Stream(device=device)
        with stream:
            torch.ones(1, device=device).add_(1)
            done = stream.record_event()
        while not done.query() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    except RuntimeError as error:
        # Out of memory is no failure of the device.
        return error if is_of_device(error) else None
    return None
