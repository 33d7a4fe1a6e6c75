"""What of a DeepSpeed configuration a pipeline allows. A job file is checked without torch and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.errors import UsageError

# DeepSpeed's default (runtime/constants.py).
_CLIPPING = 1.0


def check(config: Mapping[str, Any], pp: int) -> None:
    """Raises UsageError for what cannot be where `pp` ranks share the layers."""
    if pp == 1:
        return
    stage = require_stage(config)
    sixteen = any((config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16", "fp16"))
    if stage == 0 and sixteen:
        raise UsageError(
            f"DeepSpeed option zero_optimization.stage is 0 with bf16 or fp16, and the job's mesh says pp: {pp}: this "
            "has not been shown to be right; use stage 1"
        )
    clipping = config.get("gradient_clipping", _CLIPPING)
    if stage == 0 and clipping:
        raise UsageError(
            f"DeepSpeed option gradient_clipping is {clipping:g} (1 is its default), and the job's mesh says pp: {pp}: "
            "in stage 0 DeepSpeed clips by the norm of the first stage's layers alone; use zero_optimization.stage 1, "
            "or gradient_clipping: 0"
        )
    for key, other in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        size = (config.get(key) or {}).get(other)
        if isinstance(size, int) and size > 1:
            raise UsageError(f"DeepSpeed option {key}.{other} and mesh.pp are not supported together; remove one")


def require_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage. Raises UsageError for one that DeepSpeed's pipelines cannot have."""
    stage = int((config.get("zero_optimization") or {}).get("stage", 0))
    if stage > 1:
        raise UsageError(
            f"DeepSpeed option zero_optimization.stage is {stage}: DeepSpeed's pipelines train with stages 0 and 1; "
            "use stage 1, or give another model than a PipelineModule and leave mesh.pp out"
        )
    return stage
