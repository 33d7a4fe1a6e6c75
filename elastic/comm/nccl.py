"""How NCCL is set up so that a generation can end: torch's own reactions switched off, communicators made late.

torch 2.13 makes a communicator while it creates a group that is bound to a device, before the group is registered. An
abort finds no such group, and a rank that waits in accept() has no connected socket that could be shut down. So groups
are created unbound. Their communicators are made when all ranks have arrived at the same line of code, which is waited
for at the generation's store: that wait ends with an abort.

NCCL's collectives return at once, and no call raises their failures. torch's watchdog thread polls the communicators of
pending collectives ten times a second and keeps the first asynchronous error; `get_error` returns it at once, from any
thread. Reported errors are a connection that was closed or reset, an InfiniBand link that has exhausted its retries,
and a collective beyond its timeout. A TCP connection that falls silent is no error to NCCL: the collective timeout and
the hang limit cover it.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

_WORDS = {
    ErrorType.TIMEOUT: "a collective has not ended within its timeout",
    ErrorType.COMM_ERROR: "the connection to a peer is broken, or a device or link has failed",
    ErrorType.REMOTE_ERROR: "another rank has said that it failed",
}

# torch's own reactions to a failed NCCL collective (ProcessGroupNCCL.hpp), all of which end the process or delay its
# cleanup.
_SETTINGS = {
    # Do not end the process when a collective fails or times out.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Do not spend a minute on dumps, during which a group cannot be closed.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # The watchdog thread would throw CUDA errors that the training thread raises too, and so end the process: a device
    # assert in user code would look like a lost worker.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The monitor thread ends the process when the watchdog thread is stuck or gone; heartbeats and hang limits do that.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A communicator is connected in the background and can be aborted meanwhile.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
}


def outlive_peers() -> None:
    """Keep torch from ending this process when a peer or a collective fails. Call it before the first group is made.

    Variables that the environment sets already are kept.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def limit_connecting(timeout_s: float) -> None:
    """Limit how long torch waits for a communicator to be connected: 30 minutes by default. Read once per process."""
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))


class Communicators:
    """Of the groups of one generation. Call `connect` on the training thread, at the same places on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def connect(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Begin to connect those of `groups` that have no communicator yet; returns without waiting for peers.

        Otherwise the first collective of a group would connect it, at a time when some ranks may be minutes behind.
        """
        for group in groups:
            kinds = [device.type for device in group._device_types]
            if group.size() == 1 or group in self._asked or self._device.type not in kinds:
                continue
            backend = group._get_backend(self._device)
            if backend.name() == "nccl" and not backend._is_initialized():  # type: ignore[attr-defined]
                self._asked.add(group)
                backend.eager_connect_single_device(self._device)


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
