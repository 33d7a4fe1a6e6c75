"""Releasing a DeepSpeed engine so that the next generation can start in the same process.

Stage 3 keeps the whole engine alive through two module globals (measured: engine, shard, 7 threads and 8 descriptors
per cycle); with both cleared nothing remains.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from typing import Any

import torch
import torch.distributed as dist

from elastic.engines.deepspeed.experts.native import forget_pass

logger = logging.getLogger(__name__)


def release_engine(engine: Any) -> None:
    """Destroy a DeepSpeed engine. Errors are logged: the groups may be broken already, and the process continues."""
    try:
        for parameter in engine.module.parameters():
            # Reductions of BF16_Optimizer keep the parameters, and so this group's sockets, beyond a first collection.
            vars(parameter).pop("_dp_group", None)
        forget_pass(engine.module)
        engine.destroy()
    except Exception as error:  # noqa: BLE001 - foreign teardown code on a half-dead generation may raise anything
        logger.warning("the DeepSpeed engine did not shut down cleanly: %s: %s", type(error).__name__, error)
    clear_stage3_globals()


def hollow_out(engine: Any) -> None:
    """Empty a destroyed engine whose model stays in use.

    The graph of a loss or an output that the user still holds refers to the engine and to its optimizer through
    hooks: whatever they hold, shards and groups, would live as long. What gathers a parameter of stage 3 is in cycles.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    for parameter in engine.module.parameters():
        for cell in getattr(vars(parameter).get("partition"), "__closure__", None) or ():
            if isinstance(cell.cell_contents, Init):
                vars(cell.cell_contents).clear()
    optimizer = engine.optimizer
    offload = getattr(optimizer, "parameter_offload", None)
    for part in (offload, getattr(offload, "param_coordinator", None), optimizer, engine):
        if part is not None and not isinstance(part, torch.optim.Optimizer):
            vars(part).clear()


def clear_stage3_globals() -> None:
    """Make a process that has been through stage 3 like one that has not. Called before and after every generation.

    Besides keeping engines alive, these globals make ranks with different histories disagree: numbers of modules are
    compared between ranks, and with another `linear` gradients become ready in another order, so that stage 2 would
    silently add up the gradients of different parameters.
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
        # The cache is in the closure of a wrapper (instrument_w_nvtx) that has no __wrapped__.
        cells = getattr(value, "__closure__", None) or ()
        for found in (value, *(cell.cell_contents for cell in cells)):
            if isinstance(found, functools._lru_cache_wrapper):
                found.cache_clear()


def forget_graphs() -> None:
    """Drop what torch.compile has made of layers that DeepSpeed has given groups. Graphs that have one as a value
    outlive torch's reset: they are cut off from it."""
    torch._dynamo.reset()
    gc.collect()
    for held in gc.get_objects():
        if type(held) is torch.fx.Node and isinstance(held.meta.get("example_value"), dist.ProcessGroup):
            del held.meta["example_value"]


def destroy_groups() -> None:
    """Destroy all groups of this process, DeepSpeed's clone of the world group included."""
    import deepspeed

    if deepspeed.comm.comm.cdb is None:
        dist.destroy_process_group()
        return
    # Not torch's: that one leaves the clone alive.
    deepspeed.comm.destroy_process_group()
