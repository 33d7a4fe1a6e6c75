"""Features whose state cannot move to another world size: each refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.pipeline.module import is_pipeline


def refuse_unsupported(engine: Any) -> None:
    """Raises UsageError naming the first thing about this engine whose state cannot be carried."""
    if engine.optimizer is None or type(engine.optimizer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
        raise UsageError("the engine has no optimizer: there is no training state to carry")
    for option, used, why in _RULES:
        if used(engine):
            raise UsageError(f"{option} cannot be carried to another world size: {why}")


def _offload_device(engine: Any, which: str) -> str:
    config = engine.zero_offload_optimizer() if which == "optimizer" else engine.zero_offload_param()
    return str(getattr(config.device, "value", config.device)) if config is not None else "none"


def _world() -> int:
    return dist.get_world_size()


def _lanes(engine: Any) -> int:
    """How many ranks have the same data coordinate."""
    return int(engine.module.num_stages) if is_pipeline(engine.module) else max(engine.autotp_size(), 1)


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "tensor or model parallelism",
        lambda engine: engine.mp_world_size != _lanes(engine),
        "only the job's mesh: {tp: N} says which ranks hold slices of the same tensors",
    ),
    (
        "sequence parallelism",
        lambda engine: engine.sequence_parallel_size != 1,
        "its group size would have to divide every world size",
    ),
    (
        "a data-parallel group smaller than the world",
        lambda engine: engine.seq_dp_world_size * _lanes(engine) != _world(),
        "a new world size would not say how it is to be divided",
    ),
    (
        "zero_optimization.offload_optimizer to NVMe",
        lambda engine: _offload_device(engine, "optimizer") == "nvme",
        "the state lies in files of the node that is lost",
    ),
    (
        "zero_optimization.offload_param to NVMe",
        lambda engine: _offload_device(engine, "param") == "nvme",
        "the weights lie in files of the node that is lost",
    ),
    (
        "ZenFlow",
        lambda engine: bool(engine.zenflow),
        "part of its optimizer state lives in another process and is not readable between steps",
    ),
    (
        "SuperOffload",
        lambda engine: bool(engine.super_offload()),
        "its optimizer steps run in other processes, concurrently with training step",
    ),
    (
        "quantized weights",
        lambda engine: bool(engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights()),
        "stored values would depend on how they were partitioned",
    ),
    (
        "random layer token drop",
        lambda engine: bool(engine.random_ltd_enabled()),
        "its schedule is not part of the carried state",
    ),
    (
        "DeepSpeed's data efficiency or curriculum learning",
        lambda engine: bool(engine.curriculum_learning_enabled()),
        "its sampler counts samples by world size",
    ),
    (
        "an 'elastic_checkpoint' setting",
        lambda engine: bool(engine.zero_optimization() and engine.zero_elastic_checkpoint()),
        "it has no effect here and DeepSpeed itself refuses it; remove it",
    ),
)
