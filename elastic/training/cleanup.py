"""What a process does once before its first generation, and after each to leave nothing of it behind."""

from __future__ import annotations

import gc
import importlib
import logging
import traceback
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic.core.collector import hide_objects
from elastic.core.settings import RunSettings
from elastic.engines.base import EngineKind
from elastic.engines.model.compiled import compiles, guard_ranks

logger = logging.getLogger(__name__)

# Imported at the first generation only.
_IMPORTED_LATE = ("elastic.training.api", "elastic.training.saving.snapshots", "elastic.training.state.engine_state")
_warm = False


def warm_up(kind: EngineKind, settings: RunSettings | None = None) -> None:
    """Import all that a generation of this kind of engine needs and hide it from the garbage collector. Once per
    process. `settings`: see `EngineKind.warm_up`.

    torch and DeepSpeed create some 10**6 objects that every full collection would otherwise walk (0.1 s and more, in
    every recovery). Called before any user code runs, so that nothing of the user's is kept alive by it; the runtime
    may call it while the process still waits for its first generation.
    """
    global _warm
    if _warm:
        return
    _warm = True
    guard_ranks()
    kind.warm_up(settings)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    hide_objects()


def forget(error: BaseException | None) -> None:
    """Clear the frames that an exception and its causes hold: their locals are the user's engine and model."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def made_by(engine: Any) -> list[weakref.ReferenceType[torch.Tensor]]:
    """The masters and the state of an engine's optimizer, which must not outlive it. None: no engine."""
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is None:
        return []
    state = getattr(optimizer, "state", {})
    own = {id(parameter) for parameter in engine.module.parameters()}
    made = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    for kept in state.values():
        # Optimizers of the user's own may keep what they like.
        values = kept.values() if isinstance(kept, Mapping) else (kept,)
        made += [value for value in values if torch.is_tensor(value)]
    return [weakref.ref(each) for each in made]


def outlived(made: Sequence[weakref.ReferenceType[torch.Tensor]]) -> bool:
    """Is any of it still there?"""
    return any(ref() is not None for ref in made)


def collect(engine: weakref.ReferenceType[Any] | None, remains: bool = True) -> bool:
    """Collect garbage; True when the engine is gone. A survivor is logged: the user's code still references it.

    `remains`: does anything of the generation that matters? Else the heap is not walked, the user's objects and the
    compiler's included: 0.1 s for a million of them, in which everybody waits.
    """
    if remains:
        gc.collect()
    if engine is not None and (engine() is not None or compiles()):
        # Measured: after a request to object storage has failed during a restore, the first pass frees what its
        # exception held, and only the second frees the engine; of a compiled model, in which torch's guards are, the
        # first may leave the groups.
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if engine is not None and engine() is not None:
        logger.warning("the last generation's engine is still referenced, probably by a global of the training code")
        return False
    return True
