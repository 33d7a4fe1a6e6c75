"""The machine that was measured on: what it is, how busy it was, and how fast it copies memory."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("ray", "torch", "deepspeed", "torchft-nightly", "numpy")


def describe() -> dict[str, Any]:
    """Plain JSON."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def load() -> dict[str, Any]:
    """The load averages of 1, 5 and 15 minutes, with the time at which they were read."""
    return {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load": [round(value, 2) for value in os.getloadavg()]}


def busy_seconds() -> float:
    """Processor seconds that all of this machine's processes and its kernel have used since it was started; not those
    that it waited or that were given to another machine. Linux counts them in hundredths."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _wait, interrupts, soft_interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def copy_seconds(size: int, repetitions: int = 5, at_once: int = 1) -> list[float]:
    """Seconds to copy `size` bytes from one place in memory to another, both touched before. `at_once` threads do that,
    each with bytes of its own, and share what the memory can do: until the last has finished."""
    import torch

    pairs = [(torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)) for _ in range(at_once)]
    seconds = []
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(1 + repetitions):
            begun = time.perf_counter()
            for _done in pool.map(lambda pair: pair[1].copy_(pair[0]), pairs):
                pass
            seconds.append(time.perf_counter() - begun)
    # The first has cold caches.
    return seconds[1:]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of this checkout, read from its files."""
    git = Path(__file__).resolve().parent.parent / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        return (git / head[5:]).read_text(encoding="utf-8").strip()
    except OSError:
        return None
