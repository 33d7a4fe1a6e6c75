"""Imports of a worker, before it counts as ready; by itself, or once per node by the process that forks workers."""

from __future__ import annotations

import contextlib
import importlib

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


def preload(engine: str, snapshots: bool) -> EngineKind:
    """Import everything for the engine of that name, whose kind is returned. Touches no device."""
    for name in (*_ALWAYS, *(_WITH_SNAPSHOTS if snapshots else ())):
        importlib.import_module(name)
    for name in _OF_RAY:
        # Names of Ray's own, which another release may not have.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    kind = engine_kind(engine)
    kind.preload()
    return kind
