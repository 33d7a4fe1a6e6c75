"""Letting go of a DeepSpeed engine so that the next generation can start in the same process.

Stage 3 keeps the whole engine alive through two module globals (measured: engine, shard, 7 threads and 8 descriptors
per cycle); with both cleared nothing is left.
"""

from __future__ import annotations

import functools
import gc
import logging
import traceback
import weakref
from typing import Any

import torch

logger = logging.getLogger(__name__)

_frozen = False


def freeze_imports() -> None:
    """Take what the imports made out of the garbage collector's sight, once per process.

    torch and DeepSpeed leave some 10**6 objects behind that every full collection would walk again (0.2 s and more);
    called before any user code runs, so that nothing of the user's is kept alive by it.
    """
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True


def release_engine(engine: Any) -> None:
    """Destroy a DeepSpeed engine. Errors are logged: the groups may be broken already, and the process goes on."""
    try:
        engine.destroy()
    except Exception as error:  # noqa: BLE001 - foreign teardown code on a half-dead generation may raise anything
        logger.warning("the DeepSpeed engine did not shut down cleanly: %s: %s", type(error).__name__, error)
    clear_stage3_globals()


def clear_stage3_globals() -> None:
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    parameter_offload.FWD_MODULE_STACK.clear()
    for value in vars(PartitionedParameterCoordinator).values():
        # The cache hides behind one wrapper (instrument_w_nvtx).
        cached = getattr(value, "__wrapped__", value)
        if isinstance(cached, functools._lru_cache_wrapper):
            cached.cache_clear()


def forget(error: BaseException | None) -> None:
    """Drop the frames that an exception and its causes hold: their locals are the user's engine and model."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def collect(engine: weakref.ReferenceType[Any] | None) -> bool:
    """Collect garbage; True when the engine is gone. A survivor is logged: the user's code holds on to it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if engine is not None and engine() is not None:
        logger.warning("the last generation's engine is still referenced, probably by a global of the training code")
        return False
    return True
