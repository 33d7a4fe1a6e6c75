"""Binding of a worker's process to the processor cores near its device, from what sysfs tells of the device's bus.

torch 2.13 has `torch.numa.binding` for torchrun. It counts the devices that the process sees, of which a worker under
Ray has one, so that its `exclusive` would give every worker of a node the same cores; and it wants numactl installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

Binding = Literal["off", "node", "exclusive"]

_NVIDIA = "0x10de"
# Display controllers; a device without outputs is one, too.
_DISPLAY = "0x03"


@dataclass(frozen=True)
class Sysfs:
    """What the kernel tells of processors, NUMA nodes and PCI devices, addressed as in "0000:3b:00.0"."""

    root: Path = Path("/sys")

    def nodes(self) -> frozenset[int]:
        """The NUMA nodes that have processors or memory."""
        return core_list(self._text("devices/system/node/online") or "0")

    def node_of(self, device: str) -> int | None:
        """None where the kernel does not know it, as in many virtual machines."""
        number = int(self._text(f"bus/pci/devices/{device}/numa_node") or -1)
        return number if number >= 0 else None

    def cores(self, node: int) -> frozenset[int]:
        return core_list(self._text(f"devices/system/node/node{node}/cpulist"))

    def siblings(self, core: int) -> frozenset[int]:
        """The logical cores of one physical core."""
        return core_list(self._text(f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")) or frozenset({core})

    def gpus(self, node: int) -> tuple[str, ...]:
        """The addresses of all NVIDIA GPUs of a NUMA node, those of other workers and other jobs included."""
        found = sorted(path.name for path in (self.root / "bus/pci/devices").glob("*"))
        return tuple(device for device in found if self._is_gpu(device) and self.node_of(device) == node)

    def _is_gpu(self, device: str) -> bool:
        about = f"bus/pci/devices/{device}"
        return self._text(f"{about}/vendor") == _NVIDIA and self._text(f"{about}/class").startswith(_DISPLAY)

    def _text(self, path: str) -> str:
        """Empty where there is no such file."""
        with contextlib.suppress(OSError):
            return (self.root / path).read_text(encoding="ascii").strip()
        return ""


def core_list(text: str) -> frozenset[int]:
    """The kernel's form of a set: "0-3,8" is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def sysfs_address(bus_id: str) -> str:
    """NVML's form of a PCI address, "00000000:3B:00.0", as sysfs has it: "0000:3b:00.0"."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def cores_near(device: str, binding: Binding, allowed: frozenset[int], sysfs: Sysfs) -> frozenset[int]:
    """The cores for the worker that uses `device`, out of those that its process is `allowed` to use.

    With "exclusive" the physical cores of the NUMA node are dealt out to all its GPUs, in the order of their addresses;
    the first ones get one more each where they do not divide evenly. Raises RuntimeError where the cores are not known
    or are too few.
    """
    node = sysfs.node_of(device)
    if node is None:
        if len(sysfs.nodes()) > 1:
            raise RuntimeError(f"the kernel does not tell which NUMA node {device} belongs to")
        (node,) = sysfs.nodes()
    near = sysfs.cores(node) & allowed
    if not near:
        raise RuntimeError(f"none of the cores of its NUMA node {node} may be used by this process")
    if binding == "node":
        return near
    gpus, cores = sysfs.gpus(node), sorted({min(sysfs.siblings(core) & near) for core in near})
    if device not in gpus or len(cores) < len(gpus):
        raise RuntimeError(f"the {len(cores)} cores of its NUMA node {node} cannot be dealt out to {len(gpus)} GPUs")
    each, more = divmod(len(cores), len(gpus))
    index = gpus.index(device)
    begin = index * each + min(index, more)
    own = cores[begin : begin + each + (index < more)]
    return frozenset[int]().union(*(sysfs.siblings(core) & near for core in own))


def bind(cores: Iterable[int]) -> None:
    """Let every thread of this process, and its later threads and children, run on `cores` only.

    Threads that something has bound to other cores than the whole process keep them.
    """
    wanted, before = set(cores), os.sched_getaffinity(0)
    for thread in map(int, os.listdir("/proc/self/task")):
        # A thread that has ended meanwhile needs no cores.
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(thread) == before:
                os.sched_setaffinity(thread, wanted)


def bind_near(device: str, binding: Binding, sysfs: Sysfs | None = None) -> frozenset[int]:
    """Bind this process near `device`; returns its cores. Raises RuntimeError as `cores_near` does."""
    cores = cores_near(device, binding, frozenset(os.sched_getaffinity(0)), sysfs or Sysfs())
    bind(cores)
    logger.info("bound to %d cores near GPU %s (%s): %s", len(cores), device, binding, sorted(cores))
    return cores
