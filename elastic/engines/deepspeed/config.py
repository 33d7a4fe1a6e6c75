"""The user's DeepSpeed configuration, resolved for one world size. Pure, but for reading the file of a path."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic.core.data.micro_batches import micro_steps_per_rank
from elastic.core.errors import UsageError
from elastic.core.generation_spec import BatchSettings
from elastic.core.mesh import described
from elastic.engines.base import Config, ResolvedConfig
from elastic.engines.config_file import read_mapping
from elastic.engines.deepspeed.config_keys import refuse_unknown
from elastic.engines.deepspeed.experts import config as experts
from elastic.engines.deepspeed.layers import tensor_parallel
from elastic.engines.deepspeed.pipeline import config as pipeline
from elastic.engines.deepspeed.refused import refuse

logger = logging.getLogger(__name__)

_GLOBAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_HPZ = "zero_optimization.zero_hpz_partition_size"


def read_config(config: Config) -> dict[str, Any]:
    """A dictionary of its own, from one or from a JSON file. Raises UsageError."""
    return copy.deepcopy(dict(read_mapping(config, "DeepSpeed configuration")))


def check(
    config: Mapping[str, Any], batch: BatchSettings, workers: tuple[int, int], tp: int = 1, ep: int = 1, pp: int = 1
) -> None:
    """`resolve` at the smallest world size; a job without batch sizes leaves them to its training function (another
    configuration, or a DataLoader). Raises UsageError."""
    tensor_parallel.configured(config, tp)
    experts.configured(config, ep, tp=tp)
    pipeline.check(config, pp)
    given = (batch.global_batch, batch.micro_batch, _count(config, _GLOBAL), _count(config, _MICRO))
    if any(given):
        resolve(config, batch, *workers)
    else:
        _check_options(config)


def resolve(
    config: Mapping[str, Any],
    batch: BatchSettings,
    world_size: int,
    max_world_size: int | None = None,
    loader_batch: int | None = None,
    cell: int = 1,
    tp: int = 1,
    ep: int = 1,
    ep_changes: bool = False,
    pp: int = 1,
) -> ResolvedConfig:
    """Determine the batch sizes and make the configuration for `world_size`, in cells of `cell` ranks that share their
    samples (`core.mesh`), and of which `tp` share each layer, `pp` the layers, or `ep` the experts, as many in
    every generation unless `ep_changes`.

    The job's batch settings come first, then the configuration's. A configuration written for a fixed world size is
    read as if that were `max_world_size`. The batch figures inside `native` are nominal: they agree with one another,
    as DeepSpeed insists, and `train_batch_size` there exceeds `global_batch` where the world size does not divide it.
    `loader_batch` is the batch size of a DataLoader that was taken over: the micro-batch, which must not be given
    otherwise elsewhere. Raises UsageError for contradictions and for what is refused.
    """
    _check_options(config)
    pipeline.check(config, pp)
    sp = cell // tp // pp
    if ep > 1 and (pp > 1 or sp > 1 < tp):
        mesh = described(sp, tp, ep, pp)
        raise UsageError(f"{mesh}: ep with pp, or with both sp and tp, is supported with engine: fsdp2")
    shared = experts.configured(config, ep, ep_changes, tp) | tensor_parallel.configured(config, tp)
    batch = _with_loader(config, batch, loader_batch)
    micro, full = resolve_batch(config, batch, max_world_size or world_size)
    most = max_world_size or world_size
    total = full if batch.adaptive is None else batch.adaptive.batch(full, micro, world_size, most)
    micro_steps = micro_steps_per_rank(total, micro, world_size)
    resolved = copy.deepcopy(dict(config))
    resolved[_MICRO] = micro
    resolved[_ACCUMULATION] = micro_steps
    # As DeepSpeed counts, with AutoTP too, all ranks are data parallel: a cell's samples count once for each of them;
    # but for the stages of a pipeline, which it knows.
    resolved[_GLOBAL] = micro * micro_steps * world_size * (cell // pp)
    # DeepSpeed calls a user's own optimizer (torch's AdamW, say) untested; refusing it would surprise.
    resolved.setdefault("zero_allow_untested_optimizer", True)
    resolved |= shared
    said = _set_secondary(config, resolved, world_size, cell * ep)
    if tp > 1:
        # With AutoTP the engine counts all ranks here, and stage 3's own reading the data-parallel ones: each works out
        # its nominal batch by itself.
        del resolved[_GLOBAL]
    return ResolvedConfig(resolved, total, micro, micro_steps, full_batch=full, said=said)


def _check_options(config: Mapping[str, Any]) -> None:
    refuse(config)
    refuse_unknown(config)
    _check_stage(config)
    if _get(config, "comms_logger.enabled"):
        logger.warning("comms_logger makes every collective synchronous: the run will be slower while it is on")


def resolve_batch(config: Mapping[str, Any], batch: BatchSettings, max_world_size: int) -> tuple[int, int]:
    """(micro batch, global batch) in samples, neither of which depends on the present world size."""
    total, micro, accumulation = (_count(config, key) for key in (_GLOBAL, _MICRO, _ACCUMULATION))
    if total and micro and accumulation and total != micro * accumulation * max_world_size:
        raise UsageError(
            f"contradictory batch sizes: {_GLOBAL} {total} is not {_MICRO} {micro} * {_ACCUMULATION} {accumulation} * "
            f"{max_world_size} workers (the maximum); leave out {_ACCUMULATION}, which the platform sets"
        )
    _agree("global_batch", batch.global_batch, _GLOBAL, total)
    _agree("micro_batch", batch.micro_batch, _MICRO, micro)
    total, micro = batch.global_batch or total, batch.micro_batch or micro
    if total is None and micro is None:
        raise UsageError(
            f"no batch size: give {_GLOBAL} or {_MICRO} in the DeepSpeed configuration, the job's global_batch, or a "
            "DataLoader with a batch_size as training data"
        )
    if micro is None:
        assert total is not None
        micro = -(-total // ((accumulation or 1) * max_world_size))
    if total is None:
        total = micro * (accumulation or 1) * max_world_size
    if micro > total:
        raise UsageError(f"the micro-batch of {micro} samples is larger than the global batch of {total}")
    return micro, total


def _with_loader(config: Mapping[str, Any], batch: BatchSettings, loader_batch: int | None) -> BatchSettings:
    if loader_batch is None:
        return batch
    for said, value in (("the job says micro_batch", batch.micro_batch), (f"{_MICRO} is", _count(config, _MICRO))):
        if value is not None and value != loader_batch:
            raise UsageError(f"the DataLoader's batch_size is {loader_batch}, but {said} {value}; give one")
    return replace(batch, micro_batch=loader_batch)


def _agree(ours: str, setting: int | None, key: str, value: int | None) -> None:
    if setting is not None and setting < 1:
        raise UsageError(f"{ours} must be at least 1, got {setting}")
    if setting is not None and value is not None and setting != value:
        raise UsageError(f"the job says {ours} {setting} but the DeepSpeed configuration says {key} {value}; give one")


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    # "auto" is how Hugging Face configurations leave a figure to the framework.
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"DeepSpeed option {key} must be a positive whole number, got {value!r}")
    return value


def _set_secondary(config: Mapping[str, Any], resolved: dict[str, Any], world_size: int, cell: int) -> str:
    """hpZ is on in worlds of several whole groups. Only copies of weights depend on it; masters lie over all ranks."""
    size = _get(config, _HPZ)
    if size is None or size == 1:
        return ""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"DeepSpeed option {_HPZ} must be a positive whole number, got {size!r}")
    if _get(config, "zero_optimization.stage") != 3:
        raise UsageError(f"DeepSpeed option {_HPZ} is for stage 3, where weights are partitioned; remove the key")
    if cell > 1:
        raise UsageError(f"DeepSpeed option {_HPZ} is not supported with mesh; remove one of them")
    if world_size % size or world_size == size:
        resolved["zero_optimization"]["zero_hpz_partition_size"] = 1
        return f"weights are gathered from all workers: {world_size} are not several whole groups of {size} (hpZ)"
    return f"weights are gathered from {size} of {world_size} workers in backward passes (hpZ)"


def _check_stage(config: Mapping[str, Any]) -> None:
    stage = _get(config, "zero_optimization.stage")
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise UsageError(f"DeepSpeed option zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")


def _get(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config
