"""Translation of what torch, gloo and NCCL raise when a peer is lost. Foreign errors are translated here only."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from elastic.core.errors import CollectiveFailed, Where

# gloo raises a plain RuntimeError with these texts; a user's RuntimeError is unlikely to contain them.
_GLOO_TEXTS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed",
    "Socket Timeout",
    "socketProgress",
    "NCCL error",
    "NCCL communicator was aborted",
)
# cudaError_t: failures of a device, its memory or its links, whatever runs on it. Initialization failed, devices
# unavailable, no device (the driver has lost it), ECC, NVLink, contained, hardware stack, system not ready, unknown (a
# device that fell off the bus).
_HARDWARE = frozenset({3, 46, 100, 214, 220, 226, 714, 802, 999})
# "[127.0.0.1]:44305" and "[::1]:44305"; not the place in gloo's source, "[.../tcp/pair.cc:537]".
_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d{1,5})\b")


def as_collective_failure(error: BaseException, where: Where | None = None) -> CollectiveFailed | None:
    """The error as CollectiveFailed when it says that a peer or the store was lost; None for anything else."""
    if isinstance(error, CollectiveFailed):
        return error
    if not _is_collective(error):
        return None
    failure = CollectiveFailed(f"a collective failed: {_first_line(error)}", where)
    failure.__cause__ = error
    return failure


def is_of_device(error: BaseException) -> bool:
    """Most of these stay: the process cannot use its device any more."""
    return isinstance(error, torch.AcceleratorError)


def is_of_hardware(error: BaseException) -> bool:
    """The device's own failure, and not that of the code that runs on it."""
    return is_of_device(error) and getattr(error, "error_code", None) in _HARDWARE


def peer_of(message: str) -> str | None:
    """ "host:port" of the peer that gloo names in its message, if it names one."""
    match = _PEER.search(message)
    return None if match is None else f"{match.group(1)}:{match.group(2)}"


def _is_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    # Subclasses are others' errors: a ConnectionResetError, say, comes from a user's own connection.
    return type(error) is RuntimeError and any(text in str(error) for text in _GLOO_TEXTS)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
