"""Asynchronous errors of NCCL: its collectives return at once, and no call raises their failures.

torch's watchdog thread (ProcessGroupNCCL) polls the communicators of pending collectives ten times a second and keeps
the first asynchronous error; `get_error` returns it at once, from any thread. Reported errors are a connection that was
closed or reset, an InfiniBand link that has exhausted its retries, and a collective beyond its timeout. A TCP
connection that falls silent is no error to NCCL: the collective timeout and the hang limit cover it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

_WORDS = {
    ErrorType.TIMEOUT: "a collective has not ended within its timeout",
    ErrorType.COMM_ERROR: "the connection to a peer is broken, or a device or link has failed",
    ErrorType.REMOTE_ERROR: "another rank has said that it failed",
}


def first_error(groups: Iterable[dist.ProcessGroup]) -> str | None:
    """The first error that one of these groups reports, as a sentence; None if there is none."""
    for group in groups:
        for device in group._device_types:
            try:
                backend = group._get_backend(device)
                # Only NCCL's backend has it in torch 2.13. gloo's raises its errors where they happen.
                get_error = getattr(backend, "get_error", None)
                found = ErrorType.SUCCESS if get_error is None else get_error()
            except RuntimeError:
                # The group has no backend for this device, or is being closed.
                continue
            if found != ErrorType.SUCCESS:
                return f"{backend.name()} reports {found.name}: {_WORDS[found]}; its own words are in the worker's log"
    return None
