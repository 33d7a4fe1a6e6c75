"""What the mesh sets of `expert_parallel` in a DeepSpeed configuration, and what of it is refused. Pure: a job file is
checked without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.errors import UsageError
from elastic.core.mesh import described
from elastic.engines.deepspeed.refused import refuse_in_stage0

SECTION = "expert_parallel"
# What of it the mesh sets.
ALONE = frozenset({"enabled", "autoep_size"})
# (dotted path, when it is refused with experts, why)
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "expert_parallel.expert_tensor_parallel_size",
        lambda value: value not in (None, 1),
        "experts that are sliced too are not supported; remove the key",
    ),
    (
        "expert_parallel.comm_backend",
        lambda value: value not in (None, "comm"),
        "its buffers would outlive the groups of a generation; remove the key",
    ),
    (
        "use_data_before_expert_parallelism",
        bool,
        "the ranks that share experts are neighbours here; remove the key",
    ),
    (
        "data_types.grad_accum_dtype",
        lambda value: value == "fp32",
        "DeepSpeed's optimizer for it has not been run with experts here; remove the key",
    ),
)


def configured(config: Mapping[str, Any], ep: int, changes: bool = False, tp: int = 1) -> dict[str, Any]:
    """What of a configuration expert parallelism sets: the section with the mesh's `autoep_size`, where `ep` is above
    1, `changes` from generation to generation, or the user has enabled it (with `ep` 1 each rank has all experts, under
    the names that they have with `ep`). Ranks that share layers divide the experts further: `autoep_size` counts them.

    Raises UsageError for another size than the mesh's, and for what is refused.
    """
    section = config.get(SECTION) or {}
    size, enabled = section.get("autoep_size"), section.get("enabled")
    # DeepSpeed's own default is 1, with which it is off.
    if isinstance(size, int) and (size > 1 or enabled) and size != ep * tp:
        given = f"ep: {ep}" if tp == 1 else f"ep: {ep}, tp: {tp}"
        instead = f"mesh: {{ep: {size}}} alone" if tp == 1 else "mesh alone"
        raise UsageError(
            f"DeepSpeed option {SECTION}.autoep_size is {size}, and the job's mesh says {given}; give the job's "
            f"{instead}, by which workers are counted too"
        )
    if ep > 1 and enabled is False:
        raise UsageError(f"DeepSpeed option {SECTION}.enabled is false, and the job's mesh says ep: {ep}; remove one")
    if ep == 1 and not enabled and not changes:
        return {}
    for path, refused, why in _REFUSED:
        outer, _, key = path.rpartition(".")
        if refused((config.get(outer) or {} if outer else config).get(key)):
            raise UsageError(f"DeepSpeed option {path}: {why}")
    if ep > 1 or changes:
        refuse_in_stage0(
            config, f"ep: {ep}", "the mean of norms of which each leaves out the others' experts", "stage 1, 2 or 3"
        )
    if tp > 1:
        _require_lanes(config, described(1, tp, ep))
    return {SECTION: {**section, "enabled": True, "autoep_size": ep * tp}}


def _require_lanes(config: Mapping[str, Any], mesh: str) -> None:
    """Raises UsageError for what experts of ranks that share layers have not been shown to be right with."""
    zero = config.get("zero_optimization") or {}
    if zero.get("stage", 0) == 0:
        raise UsageError(f"{mesh} with experts is not supported in stage 0: use zero_optimization.stage 1, 2 or 3")
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device", "none") != "none":
            raise UsageError(
                f"DeepSpeed option zero_optimization.{key}: DeepSpeed refuses it with experts and {mesh}; remove it"
            )


def size_of(config: Mapping[str, Any]) -> int:
    """How many ranks share the experts, by a resolved configuration; 0 where AutoEP is off."""
    section = config.get(SECTION) or {}
    return int(section["autoep_size"]) if section.get("enabled") else 0
