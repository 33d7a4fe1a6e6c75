"""What of `accelerate.Accelerator`'s arguments and calls an elastic run honours: the rest is refused by name."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.integrations.engine_config import Asked, completed, workers_planned
from elastic.training.watch.once import warn_once

logger = logging.getLogger(__name__)

_PLATFORM = "the platform distributes the model; the job's `deepspeed` or `fsdp2` key says how"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Argument -> what to do instead.
_REFUSED: Mapping[str, str] = {
    "deepspeed_plugin": 'give the DeepSpeed configuration as the job\'s `deepspeed`, without "auto"',
    "deepspeed_plugins": 'give the DeepSpeed configuration as the job\'s `deepspeed`, without "auto"',
    "fsdp_plugin": _PLATFORM,
    "megatron_lm_plugin": _PLATFORM,
    "torch_tp_plugin": _PLATFORM,
    "parallelism_config": _PLATFORM,
}
_HANDLERS: Mapping[str, str] = {
    "GradScalerKwargs": "the loss scaler is the engine's: `fp16` in the job's `deepspeed`",
    "AutocastKwargs": "the model's precision is the engine's; give it to accelerator.autocast() for what is around it",
    "FP8RecipeKwargs": "8 bits have not been run",
    "AORecipeKwargs": "8 bits have not been run",
    "TERecipeKwargs": "8 bits have not been run",
    "MSAMPRecipeKwargs": "8 bits have not been run",
}


def given(kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `kind`'s constructor by name."""
    bound = inspect.signature(kind).bind(*args, **kwargs)
    return dict(bound.arguments)


def refuse(arguments: Mapping[str, Any]) -> None:
    """Raises UsageError with the first argument that an elastic run cannot honour."""
    for name, instead in _REFUSED.items():
        if arguments.get(name) is not None:
            raise _refused(f"Accelerator({name}=...)", instead)
    for handler in arguments.get("kwargs_handlers") or ():
        name = type(handler).__name__
        if name in _HANDLERS:
            raise _refused(name, _HANDLERS[name])
        hook = str(getattr(getattr(handler, "comm_hook", None), "value", "no"))
        if name == "DistributedDataParallelKwargs" and hook != "no":
            raise _refused(f"the communication hook {hook}", "the job's `communication` says how gradients travel")
        if name in ("DistributedDataParallelKwargs", "InitProcessGroupKwargs"):
            logger.info("%s: the platform connects the workers and averages the gradients, without these", name)


def refuse_type(distributed: Any) -> None:
    """What accelerate's own environment (`accelerate launch`) may have asked for."""
    name = str(getattr(distributed, "value", distributed))
    if name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise _refused(f"accelerate's own {name} (ACCELERATE_USE_... in the environment)", _PLATFORM)


def precision(arguments: Mapping[str, Any]) -> str:
    """ "no", "bf16" or "fp16", from the argument or, as accelerate has it, from the environment."""
    asked = arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    found = str(getattr(asked, "value", asked)).lower()
    if found not in ("no", "bf16", "fp16"):
        raise _refused(f"Accelerator(mixed_precision={found!r})", "8 bits have not been run")
    return found


def engine_config(precision: str, accumulation: int, loader: DataLoader[Any], spec: GenerationSpec) -> dict[str, Any]:
    """The job's, and what it leaves open. Gradients are clipped where the script asks for it, or the job. Raises
    UsageError for another global batch than that of the script at the number of workers that the run is planned for."""
    autocast = precision == "bf16" and spec.engine == "deepspeed" and "bf16" not in (spec.engine_config or {})
    size = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size or 1
    asked = Asked(
        micro_batch=int(size),
        accumulation=accumulation,
        said_micro_batch=f"the DataLoader's batch_size is {size}",
        said_accumulation=f"the Accelerator's gradient_accumulation_steps is {accumulation}",
        owner="Accelerator",
        bf16=precision == "bf16" and not autocast,
        fp16=precision == "fp16",
        clipping=0.0,
    )
    config, planned = completed(asked, spec), workers_planned(spec)
    if autocast:
        # As accelerate has it: weights stay in fp32, and inputs may.
        config.setdefault("torch_autocast", {"enabled": True, "dtype": "bfloat16"})
    batch = size * accumulation * planned
    for key in ("global_batch", "train_batch_size"):
        whole = spec.batch.global_batch if key == "global_batch" and key not in config else config.get(key)
        if whole not in (None, batch):
            raise UsageError(
                f"{key} in the job is {whole}, and the script's batch is {batch}: {size} of the DataLoader * "
                f"{accumulation} of gradient_accumulation_steps * {planned} workers; scripts count the "
                "updates of an epoch by it: leave the job's out"
            )
    if spec.batch.adaptive is not None:
        raise UsageError(
            "batch.adaptive does not go with an Accelerator, whose scripts count epochs in steps of one size; leave it "
            "out"
        )
    return config


def compile_model(plugin: Any, model: torch.nn.Module) -> None:
    """As accelerate would; in place, so that the engine trains the module that everybody else holds."""
    options = plugin.to_kwargs()
    backend = options.pop("backend", None)
    if backend is None or str(getattr(backend, "value", backend)).lower() == "no":
        return
    if getattr(plugin, "use_regional_compilation", False):
        raise _refused("use_regional_compilation", "compile the layers in the script: layer.compile()")
    model.compile(backend=str(getattr(backend, "value", backend)).lower(), **options)


def clips(model: torch.nn.Module, parameters: Any, norm_type: float) -> bool:
    """False where it is given no parameters, as an iterator is that the optimizer has used up: accelerate clips nothing
    then. Raises UsageError for a norm of a part of the gradient, and for another than the L2 norm."""
    if float(norm_type) != 2.0:
        raise _refused(f"clip_grad_norm_(norm_type={norm_type})", "the engine clips by the L2 norm")
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    given = list(parameters)
    if not given:
        warn_once(
            logger,
            "accelerator.clip_grad_norm_ was given no parameters, and clips nothing: an iterator, as filter(...), "
            "is empty when the optimizer has been made of it; give it a list",
        )
        return False
    asked = sum(1 for parameter in given if parameter.requires_grad)
    trained = sum(1 for parameter in model.parameters() if parameter.requires_grad)
    if asked != trained:
        raise _refused(
            f"clip_grad_norm_ of {asked} of the {trained} trained parameters",
            "the engine clips the whole gradient",
        )
    return True


def is_scheduler(each: Any) -> bool:
    """As accelerate takes them: torch's, and those of the script's own."""
    return isinstance(each, torch.optim.lr_scheduler.LRScheduler)


def _refused(what: str, instead: str) -> UsageError:
    return UsageError(f"elastic.integrations.accelerate: {what} is not supported; {instead}")
