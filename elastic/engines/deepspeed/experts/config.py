"""What the mesh sets of `expert_parallel` in a DeepSpeed configuration, and what of it is refused. Pure: a job file is
checked without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core.errors import UsageError
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


def configured(config: Mapping[str, Any], ep: int, changes: bool = False) -> dict[str, Any]:
    """What of a configuration expert parallelism sets: the section with the mesh's `autoep_size`, where `ep` is above
    1, `changes` from generation to generation, or the user has enabled it (with `ep` 1 each rank has all experts, under
    the names that they have with `ep`).

    Raises UsageError for another size than the mesh's, and for what is refused.
    """
    section = config.get(SECTION) or {}
    size, enabled = section.get("autoep_size"), section.get("enabled")
    if isinstance(size, int) and size > 1 and size != ep:
        raise UsageError(
            f"DeepSpeed option {SECTION}.autoep_size is {size}, and the job's mesh says ep: {ep}; give the job's "
            f"mesh: {{ep: {size}}} alone, by which workers are counted too"
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
    return {SECTION: {**section, "enabled": True, "autoep_size": ep}}


def size_of(config: Mapping[str, Any]) -> int:
    """How many ranks share the experts, by a resolved configuration; 0 where AutoEP is off."""
    section = config.get(SECTION) or {}
    return int(section["autoep_size"]) if section.get("enabled") else 0
