"""Is a device fit for a run that lasts for weeks? From what its driver tells before a worker uses it, and meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

# What the driver asks for after the errors (Xid) that it has seen: nvmlDeviceGetFieldValues, GET_GPU_RECOVERY_ACTION.
_RECOVERY = {
    1: "a reset of the GPU", 2: "a restart of the node", 3: "an end of all peer-to-peer traffic",
    4: "a drained and reset GPU", 5: "a recovered IMEX domain", 6: "a reset of the bus", 7: "a restart of the system",
}  # fmt: skip

# Errors that the driver reports (Xid), by NVIDIA's catalogue of them: after the first ones nothing that the device
# computes or moves is to be trusted until it is reset. After the second ones its health tells whether it is.
_FATAL = {
    48: "a double-bit error of its memory", 64: "a row of its memory could not be remapped", 74: "an NVLink has failed",
    79: "it has fallen off the bus", 95: "an uncontained error of its memory",
    119: "its system processor does not answer", 120: "its system processor has failed",
    140: "an error of its memory that was not recovered",
}  # fmt: skip
_TOLD = {
    63: "a row of its memory is to be remapped", 92: "many single-bit errors of its memory",
    94: "a contained error of its memory",
}  # fmt: skip
# What a program does to itself: an index out of range, a crash, its own end.
_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


@dataclass(frozen=True)
class Fault:
    """What a device has reported while a worker uses it. `unfit`: no worker should go on with it."""

    evidence: str
    unfit: bool


@dataclass(frozen=True)
class DeviceHealth:
    """Defaults stand for what a device or its driver does not tell.

    `name`: the product. `mig`: the device is split, or this is a part of one. `recovery`: NVML's number of what the
    driver asks for; 0 for nothing. `uncorrected_errors` of memory since the driver was loaded. `remap_pending`,
    `remap_failed`: of memory rows, or retired pages on devices that have those. `links` are active NVLinks,
    `usual_links` the most that a device of the same name on the node has; `link_recoveries` counts retrainings of them
    after errors. `slowdowns`: why the clocks are lowered, other than to save power or by a setting.
    """

    name: str = ""
    mig: bool = False
    recovery: int = 0
    uncorrected_errors: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    links: int = 0
    usual_links: int = 0
    link_recoveries: int = 0
    slowdowns: tuple[str, ...] = ()


def unfit(health: DeviceHealth) -> str | None:
    """Why no worker should begin on this device, and what to do about it; None where nothing is known against it."""
    if health.mig:
        return "it is split by MIG, and NCCL does not connect parts of devices: switch MIG off (nvidia-smi -mig 0)"
    if health.remap_failed:
        return "rows of its memory that fail can no longer be replaced: have the GPU exchanged"
    if health.recovery:
        wanted = _RECOVERY.get(health.recovery, f"recovery action {health.recovery}")
        return f"after errors that it has seen, its driver asks for {wanted} (nvidia-smi -q; Xid in the kernel's log)"
    if health.remap_pending:
        return "memory that failed is replaced only when it is reset: reset the GPU (nvidia-smi -r) or restart the node"
    if 0 < health.links < health.usual_links:
        return (
            f"{health.links} of its NVLinks are active, {health.usual_links} of another {health.name} of the node: "
            "look at nvidia-smi nvlink --status, and reset the GPU"
        )
    return None


def doubts(health: DeviceHealth) -> tuple[str, ...]:
    """What is worth a line in the log although a worker may begin."""
    found = []
    if health.uncorrected_errors:
        found.append(f"{health.uncorrected_errors} uncorrectable memory errors since its driver was loaded")
    if health.link_recoveries:
        found.append(f"its NVLinks were retrained {health.link_recoveries} times after errors")
    if health.usual_links and not health.links:
        found.append(f"none of its NVLinks is active, {health.usual_links} of another {health.name} of the node")
    if health.slowdowns:
        found.append(f"its clocks are lowered: {', '.join(health.slowdowns)}")
    return tuple(found)


def fault(xid: int | None, health: DeviceHealth) -> Fault | None:
    """What the driver's error `xid` (None: there was none), and the device's health right after it, mean for the worker
    that uses the device; None where nothing is known against it."""
    if xid in _OF_PROGRAMS:
        xid = None
    why = unfit(health)
    if xid is None:
        return None if why is None else Fault(why, unfit=True)
    meaning = _FATAL.get(xid) or _TOLD.get(xid)
    said = f"Xid {xid}: {meaning}" if meaning else f"Xid {xid}"
    return Fault(said if why is None else f"{said}; {why}", unfit=xid in _FATAL or why is not None)
