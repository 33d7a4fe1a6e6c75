"""Figures of one device without a training: copies, digests, a snapshot behind other work, process groups.

Each runs on the CPU as well, where its figures are no use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.figures import Figure, Target

CASE = "gpu"
_REPETITIONS = 5
# About a fifth of a second on the devices of today.
_CYCLES = 400_000_000


def the_device() -> Any:
    import torch

    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def transfers(nbytes: int) -> list[Figure]:
    """GB/s of copies from the device to pinned and to pageable memory, and of the two ways to one digest."""
    import torch

    from elastic.checkpoint.digest import digest, digest_on_device
    from elastic.training.state.host import host_memory
    from elastic.training.state.pins import Pins

    device = the_device()
    # In pieces of a size that a device has room for.
    size = min(nbytes, 1 << 30)
    source, target, pins = torch.ones(size, dtype=torch.uint8, device=device), host_memory(size), Pins(device)
    floats = source.view(torch.float32)
    pins.pin(target)
    ways: dict[str, Callable[[], object]] = {
        "copy from the device to pinned memory": lambda: target.copy_(source, non_blocking=True),
        "copy from the device by tensor.cpu()": lambda: source.cpu() if device.type == "cuda" else source.clone(),
        "digest on the device": lambda: digest_on_device(floats, "k/n", 0),
        "digest on the host": lambda: digest(target.view(torch.float32), "k/n", 0),
    }
    found = [Figure(CASE, name, "GB/s", tuple(size / each / 1e9 for each in _timed(do))) for name, do in ways.items()]
    pins.close()
    return found


def begun_behind_a_kernel(nbytes: int) -> list[Figure]:
    """How long the training thread is kept by the begin of a snapshot while the device is busy for a fifth of a
    second: it must not wait for that."""
    import torch

    from elastic.training.state.copier import Copier
    from elastic.training.state.host import HostCopy, HostPool

    device = the_device()
    source, pool, copier = torch.ones(nbytes // 4, device=device), HostPool(device), Copier(device)
    # Pins its memory.
    pool.copy([HostCopy("a", source)])
    seconds = []
    for _ in range(_REPETITIONS):
        if device.type == "cuda":
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        _, copies = pool.prepare([HostCopy("a", source)])
        begun = time.perf_counter()
        copier.start(copies, lambda: None)
        seconds.append(time.perf_counter() - begun)
        copier.fence()
        copier.drain(60.0)
    copier.close()
    pool.close()
    limit = (Target("max", 0.005),) if device.type == "cuda" else ()
    return [Figure(CASE, "begin of a snapshot behind a busy device", "s", tuple(seconds), targets=limit)]


def groups(count: int) -> list[Figure]:
    """Seconds to make a process group of one, to use it, to abort and to destroy it; and the device's memory."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from elastic.comm.nccl import outlive_peers

    outlive_peers()
    device = the_device()
    seconds, free = [], []
    for _ in range(count):
        begun = time.perf_counter()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device=device))
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()
        dist.destroy_process_group()
        seconds.append(time.perf_counter() - begun)
        free.append(torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0)
    # The first groups fill NCCL's own caches.
    lost = (free[min(4, count - 1)] - free[-1]) / 1e6
    limit = (Target("max", 16.0),) if device.type == "cuda" else ()
    return [
        Figure(CASE, "a process group of one: made, used, aborted, destroyed", "s", tuple(seconds)),
        Figure(CASE, "device memory lost by them", "MB", (lost,), targets=limit),
    ]


def _timed(do: Callable[[], object]) -> list[float]:
    """Once unmeasured: caches and first allocations."""
    import torch

    seconds = []
    for _ in range(_REPETITIONS + 1):
        begun = time.perf_counter()
        do()
        if the_device().type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]
