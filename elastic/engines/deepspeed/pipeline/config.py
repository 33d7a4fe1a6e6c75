"""What of a DeepSpeed configuration a pipeline allows. A job file is checked without torch and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.engines.deepspeed.refused import refuse_in_stage0


def check(config: Mapping[str, Any], pp: int) -> None:
    """Raises UsageError for what cannot be where `pp` ranks share the layers."""
    if pp == 1:
        return
    require_stage(config)
    refuse_in_stage0(config, f"pp: {pp}", "the norm of the first stage's layers alone", "stage 1")
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
