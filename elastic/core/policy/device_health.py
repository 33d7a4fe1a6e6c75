"""Is a device fit for a run that lasts for weeks? From what its driver tells before a worker begins to use it."""

from __future__ import annotations

from dataclasses import dataclass

# What the driver asks for after the errors (Xid) that it has seen: nvmlDeviceGetFieldValues, GET_GPU_RECOVERY_ACTION.
_RECOVERY = {
    1: "a reset of the GPU", 2: "a restart of the node", 3: "an end of all peer-to-peer traffic",
    4: "a drained and reset GPU", 5: "a recovered IMEX domain", 6: "a reset of the bus", 7: "a restart of the system",
}  # fmt: skip


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
