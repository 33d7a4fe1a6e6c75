"""Check that the device that Ray reserves for a worker is the one that torch and DeepSpeed use, and that it is fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.comm.allocator import let_segments_grow
from elastic.comm.nvml import NvmlDevice
from elastic.core.errors import UsageError
from elastic.core.policy.device_health import doubts, unfit
from elastic.runtime.worker.numa import Binding, Sysfs, bind_near, sysfs_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """What this process has. `built_for` is the accelerator that torch was built for ("cuda"; None: a CPU build).

    `devices` counts those that torch finds, `used` is the engine's choice ("cpu", "cuda", ...).
    """

    torch: str
    built_for: str | None
    devices: int
    used: str


def choose(given: Sequence[int | str], environment: MutableMapping[str, str]) -> None:
    """Before torch or any code of the user's touches a device: a worker without a GPU uses none, and torch's allocator
    is set up for one that has. What the environment sets is kept. `given`: see `check_device`."""
    if not given:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    elif environment.get("DS_ACCELERATOR") != "cpu":
        let_segments_grow(environment)


def look(engine: str) -> Seen:
    """Imports torch and the engine, and initialises neither the device nor a context on it."""
    import torch

    from elastic.engines.select import engine_kind

    built_for = torch.accelerator.current_accelerator()
    return Seen(
        torch=str(torch.__version__),
        built_for=None if built_for is None else built_for.type,
        devices=torch.accelerator.device_count(),
        used=engine_kind(engine).device(0)[1].type,
    )


def check_device(given: Sequence[int | str], seen: Seen, environment: Mapping[str, str], node: str) -> None:
    """`given` are the ids of the GPUs that Ray reserves for this worker, `node` names its node.

    Raises UsageError where no node of this environment could do it, and RuntimeError where another node may: the slot
    is then tried again and given back. DS_ACCELERATOR=cpu in the environment allows training on the CPU of a GPU node.
    """
    if not given or environment.get("DS_ACCELERATOR") == "cpu":
        return
    reserved = f"Ray reserves GPU {', '.join(map(str, given))} of node {node} for this worker"
    if seen.built_for is None:
        raise UsageError(
            f"{reserved}, but torch {seen.torch} is a build without GPU support: install the CUDA build of torch on "
            "all nodes, or leave GPU out of resources_per_worker, or set DS_ACCELERATOR=cpu to train on the CPU"
        )
    if seen.devices == 0:
        raise RuntimeError(
            f"{reserved}, but torch {seen.torch} finds no {seen.built_for} device there: look at the driver "
            "(nvidia-smi) and at CUDA_VISIBLE_DEVICES"
        )
    if seen.devices != len(given):
        raise UsageError(
            f"{reserved}, but torch sees {seen.devices} devices, so workers of one node would share the first: unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, so that each worker sees its own device only"
        )
    if seen.used == "cpu":
        raise RuntimeError(
            f"{reserved}, and torch {seen.torch} finds it, but DeepSpeed would train on the CPU: look at its warnings "
            "in the worker's log"
        )


def check_health(given: Sequence[int | str], environment: Mapping[str, str], node: str) -> None:
    """What NVML tells of the reserved GPUs, before anything is placed on them; nothing without `nvidia-ml-py`.

    Arguments as in `check_device`. Raises RuntimeError for a device that will not last: another node may have a better
    one. What is no reason to refuse it is logged.
    """
    if environment.get("DS_ACCELERATOR") == "cpu":
        return
    for identity in map(str, given):
        device = NvmlDevice.find(identity)
        if device is None:
            continue
        health = device.health()
        for doubt in doubts(health):
            logger.warning("GPU %s of node %s: %s", identity, node, doubt)
        if (why := unfit(health)) is not None:
            raise RuntimeError(f"GPU {identity} of node {node}, which Ray reserves for this worker, is unfit: {why}")


def bind_to_device(
    given: Sequence[int | str], binding: Binding, environment: Mapping[str, str], node: str, sysfs: Sysfs | None = None
) -> None:
    """Bind this process to the cores near the reserved GPU, where the job asks for that. Arguments as in
    `check_device`. Raises RuntimeError, naming GPU and node, where the cores are not known: another node may tell."""
    if binding == "off" or not given or environment.get("DS_ACCELERATOR") == "cpu":
        return
    identity = str(given[0])
    try:
        bind_near(_address(identity), binding, sysfs)
    except RuntimeError as error:
        raise RuntimeError(
            f"numa_binding: {binding} cannot be kept for GPU {identity} of node {node}: {error}; set numa_binding: off "
            "or give the container the cores of the node"
        ) from error


def _address(identity: str) -> str:
    """Of the device's PCI slot in sysfs, without initialising the device where NVML is there."""
    device = NvmlDevice.find(identity)
    if device is not None and (told := device.bus_id()):
        return sysfs_address(told)
    import torch

    # The process sees one device (`check_device`). torch's stubs lack these fields, which its own NUMA binding reads.
    found: Any = torch.cuda.get_device_properties(0)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
