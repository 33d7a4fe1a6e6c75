"""Imports of a worker, before it counts as ready; by itself, or once per node by the process that forks workers."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

from elastic.engines.base import EngineKind
from elastic.engines.select import engine_kind

_ALWAYS = (
    # The public package; what it exports is imported when it is first used.
    "elastic",
    "elastic.checkpoint.storage",
    "elastic.checkpoint.writer",
    "elastic.comm.nccl",
    "elastic.comm.rendezvous",
    # With an actor's handle comes its class.
    "elastic.runtime.controller.actor",
    "elastic.runtime.worker.actor",
    "elastic.runtime.worker.ray_coordinator",
    "elastic.runtime.worker.work_watch",
    "elastic.training.api",
    "elastic.training.cleanup",
    "elastic.training.in_loop.ahead",
    "elastic.training.in_loop.function_call",
    "elastic.training.loop",
)
# Imported by Ray while a process connects to it and gets its first arguments. (Not pyarrow: it starts a thread.)
_OF_RAY = ("ray._common.usage.usage_lib", "ray._private.arrow_serialization")
_WITH_SNAPSHOTS = (
    "elastic.checkpoint.memory.source",
    "elastic.checkpoint.memory.snapshot_client",
    "elastic.training.state.pins",
)
# torch asks the kernel for huge pages where this is 1, for tensors of 2 MiB and more in host memory.
_HUGE_PAGES_OF_TORCH = "THP_MEM_ALLOC_ENABLE"
_HUGE_PAGES_OF_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def preload(engine: str, snapshots: bool) -> EngineKind:
    """Import everything for the engine of that name, whose kind is returned. Touches no device."""
    use_huge_pages()
    for name in (*_ALWAYS, *(_WITH_SNAPSHOTS if snapshots else ())):
        importlib.import_module(name)
    for name in _OF_RAY:
        # Names of Ray's own, which another release may not have.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    kind = engine_kind(engine)
    kind.preload()
    return kind


def use_huge_pages(kernel: Path = _HUGE_PAGES_OF_KERNEL) -> None:
    """Where the kernel gives them to who asks; torch reads its variable once, when it makes its first tensor.

    Masters, moments and flat buffers are new memory in every generation, for which the kernel takes several times as
    long in small pages. A job that has set the variable keeps its value.
    """
    with contextlib.suppress(OSError):
        if "[madvise]" in kernel.read_text():
            os.environ.setdefault(_HUGE_PAGES_OF_TORCH, "1")
