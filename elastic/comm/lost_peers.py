"""What a backend has found out by itself: NCCL's collectives return at once, and no call raises what becomes of them.

A thread of torch's asks the communicators of what is under way for their asynchronous errors, ten times a second, and
keeps the first (ProcessGroupNCCL's watchdog); `get_error` tells it, at once and from any thread. That is a connection
that was closed or reset, an InfiniBand link whose own tries are spent, or a collective beyond its timeout. A TCP
connection on which nothing arrives any more is no error to NCCL: that is left to the timeout, and to the hang limit.
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
    """The first error that one of these groups knows of, in words; None where all is well."""
    for group in groups:
        for device in group._device_types:
            try:
                backend = group._get_backend(device)
                found = backend.get_error()
            except RuntimeError:
                # It raises its errors where they happen, as gloo does; or the group is being closed.
                continue
            if found != ErrorType.SUCCESS:
                return f"{backend.name()} reports {found.name}: {_WORDS[found]}; its own words are in the worker's log"
    return None
