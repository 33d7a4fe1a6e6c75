"""Letting go of a DeepSpeed engine so that the next generation can start in the same process.

Stage 3 keeps the whole engine alive through two module globals (measured: engine, shard, 7 threads and 8 descriptors
per cycle); with both cleared nothing is left.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from elastic.engines import build_lock

if TYPE_CHECKING:
    from elastic.training.context import Generation

logger = logging.getLogger(__name__)

# DeepSpeed and torch import these at the first engine only, some 750 modules with what they pull in.
_IMPORTED_LATE = (
    # By the first optimizer.
    "torch._dynamo",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.auto_ep_comm",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "elastic.training.api",
    "elastic.training.snapshots",
    "elastic.training.state",
)
_warm = False


def warm_up() -> None:
    """Import all that a generation needs and take it out of the garbage collector's sight. Once per process.

    torch and DeepSpeed leave some 10**6 objects behind that every full collection would walk again (0.1 s and more, in
    every recovery). Called before any user code runs, so that nothing of the user's is kept alive by it; the runtime
    may call it while the process still waits for its first generation.
    """
    global _warm
    if _warm:
        return
    _warm = True
    import deepspeed

    build_lock.install()
    # Its first use probes every operator; the shared-memory one compiles for about a minute and serves inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _compiled_at_first_use():
        for name in _IMPORTED_LATE:
            try:
                importlib.import_module(name)
            except ImportError as error:
                logger.debug("%s is not there to be imported early: %s", name, error)
    gc.collect()
    gc.freeze()


@contextmanager
def _compiled_at_first_use() -> Iterator[None]:
    """DeepSpeed's Muon has torch.compile decorate functions while it is imported, which loads the whole compiler: 0.8 s
    of CPU in every process, whatever optimizer it has. Here a function is compiled when it is called."""
    from deepspeed.runtime import compiler

    original = compiler.compile

    def compile_later(*args: Any, **kwargs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled = functools.cache(lambda: original(*args, **kwargs)(function))

            @functools.wraps(function)
            def call(*values: Any, **named: Any) -> Any:
                return compiled()(*values, **named)

            return call

        return decorate

    compiler.compile = compile_later
    try:
        yield
    finally:
        compiler.compile = original


def leave(generation: Generation) -> bool:
    """Close the loader, the engine and the groups; True when nothing of the engine is left in this process."""
    engine: weakref.ReferenceType[Any] | None = None
    if generation.loader is not None:
        generation.loader.close()
        generation.loader = None
    if generation.engine is not None:
        engine = weakref.ref(generation.engine.deepspeed)
        release_engine(generation.engine.deepspeed)
        generation.engine.let_go()
        generation.engine = None
    generation.failure = None
    generation.group.leave()
    return collect(engine)


def release_engine(engine: Any) -> None:
    """Destroy a DeepSpeed engine. Errors are logged: the groups may be broken already, and the process goes on."""
    try:
        engine.destroy()
    except Exception as error:  # noqa: BLE001 - foreign teardown code on a half-dead generation may raise anything
        logger.warning("the DeepSpeed engine did not shut down cleanly: %s: %s", type(error).__name__, error)
    clear_stage3_globals()


def clear_stage3_globals() -> None:
    """Make a process that has been through stage 3 like one that has not. Called before and after every generation.

    Besides keeping engines alive, what stage 3 leaves behind makes ranks with different pasts disagree: numbers of
    modules are compared between them, and with another `linear` gradients are finished in another order, so that
    stage 2 would add up different parameters' gradients without a word.
    """
    from deepspeed.runtime.zero import linear, parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    Init.param_id = Init.num_persisted_parameters = Init.num_persisted_elements = 0
    Init.apply_param_persistence = False
    if torch.nn.functional.linear is linear.zero3_linear_wrap:
        torch.nn.functional.linear = Init.linear_bk
    register = inspect.signature(parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module)
    # A mutable default that serves DeepSpeed as a counter.
    register.parameters["count"].default[0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()
    for value in vars(PartitionedParameterCoordinator).values():
        # The cache hides in the closure of a wrapper (instrument_w_nvtx) that does not say what it wraps.
        cells = getattr(value, "__closure__", None) or ()
        for found in (value, *(cell.cell_contents for cell in cells)):
            if isinstance(found, functools._lru_cache_wrapper):
                found.cache_clear()


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
    if engine is not None and engine() is not None:
        # Measured: where a request to object storage has failed during the restore, the first pass frees what its
        # exception held, and only a second one the engine.
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if engine is not None and engine() is not None:
        logger.warning("the last generation's engine is still referenced, probably by a global of the training code")
        return False
    return True
