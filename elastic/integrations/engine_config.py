"""The engine's configuration, where a library's own arguments say part of it: the job's, and what that leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.generation_spec import GenerationSpec
from elastic.training import context


@dataclass(frozen=True)
class Asked:
    """What the arguments say, and in words for a message: under which names, with which value. `micro_batch` counts
    samples, `accumulation` micro-batches of a worker in a step. `clipping` is the largest L2 norm of the gradient."""

    micro_batch: int
    accumulation: int
    said_micro_batch: str
    said_accumulation: str
    # Whose `bf16` and `fp16` these are.
    owner: str
    bf16: bool = False
    fp16: bool = False
    clipping: float | None = None


def spec_of_generation() -> GenerationSpec:
    """Waits for it, where there is none yet."""
    generation = context.current()
    assert generation is not None
    return generation.scope.spec


def workers_planned(spec: GenerationSpec) -> int:
    """How many train on different samples where the run has all the workers that it may have."""
    return max(spec.max_world_size, spec.world_size) // spec.mesh.per_cell


def completed(asked: Asked, spec: GenerationSpec) -> dict[str, Any]:
    """A global batch of the job stands, and its `gradient_clipping`. Raises UsageError where both give the size of a
    micro-batch, the steps of accumulation or a precision, and they differ."""
    config = dict(spec.engine_config or {})
    if spec.engine == "deepspeed":
        _add_batch(config, asked)
    else:
        config.setdefault("micro_batch", asked.micro_batch)
        if spec.batch.global_batch is None:
            config.setdefault("global_batch", asked.micro_batch * asked.accumulation * workers_planned(spec))
    same = {
        "micro_batch": (asked.micro_batch, asked.said_micro_batch),
        "train_micro_batch_size_per_gpu": (asked.micro_batch, asked.said_micro_batch),
        "gradient_accumulation_steps": (asked.accumulation, asked.said_accumulation),
    }
    for key, (given, said) in same.items():
        if key in config and config[key] != given:
            raise UsageError(f"{said}, and {key} in the job's `{spec.engine}` is {config[key]}")
    if asked.clipping is not None:
        config.setdefault("gradient_clipping", asked.clipping)
    (_add_precision if spec.engine == "deepspeed" else _add_param_dtype)(config, asked)
    return config


def _add_batch(config: dict[str, Any], asked: Asked) -> None:
    if "train_batch_size" not in config:
        config.setdefault("gradient_accumulation_steps", asked.accumulation)
    config.setdefault("train_micro_batch_size_per_gpu", asked.micro_batch)


def _add_param_dtype(config: dict[str, Any], asked: Asked) -> None:
    """Masters stay in fp32, as with accelerate."""
    if asked.fp16:
        raise UsageError(f"{asked.owner}'s fp16 needs a loss scaler, which engine fsdp2 does not have; set bf16")
    if asked.bf16 and config.setdefault("param_dtype", "bfloat16") != "bfloat16":
        raise UsageError(f"{asked.owner} has bf16, and param_dtype in the job's `fsdp2` is {config['param_dtype']}")


def _add_precision(config: dict[str, Any], asked: Asked) -> None:
    for name in ("bf16", "fp16"):
        enabled = bool((config.get(name) or {}).get("enabled"))
        if getattr(asked, name) and not enabled:
            if name in config:
                raise UsageError(f"{asked.owner} has {name}, and the job's `deepspeed` switches {name} off")
            config[name] = {"enabled": True}
