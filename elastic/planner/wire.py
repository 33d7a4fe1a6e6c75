"""What a step's collectives put on the wire, and which setting would put less there."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.core.data.collectives import CollectiveUse
from elastic.planner.links import wire_bytes

# torch.distributed's names -> those of the cost model.
_OPERATIONS = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
}
# A chain: every rank but the last passes on the whole tensor.
_CHAINS = {"broadcast", "reduce", "gather", "scatter"}
# Below this share of the gathered weights an all-reduce is no reduction of gradients (norms, overflow flags).
_GRADIENTS = 0.25


def sent_bytes(use: CollectiveUse, ranks: int) -> float:
    """Bytes that one rank sends by ring algorithms (`elastic.planner.links`); the mean over ranks where they differ."""
    if use.op == "recv":
        return 0.0
    if use.op in _OPERATIONS:
        return wire_bytes(_OPERATIONS[use.op], ranks, use.bytes)
    return use.bytes * (ranks - 1) / ranks if use.op in _CHAINS else float(use.bytes)


def group_size(use: CollectiveUse, world_size: int) -> int:
    """Ranks of the row's axis: as many as its name says ("nodes, 3 ranks"), else all."""
    return int(use.axis.split()[-2]) if use.axis.endswith(" ranks") else world_size


def advice(rows: Sequence[CollectiveUse], world_size: int) -> list[str]:
    """Sentences, each naming the setting, the bytes that it saves, and what it costs."""
    gathered = _total(rows, "all_gather")
    reduced = _total(rows, "all_reduce")
    # DeepSpeed's stages 1 and 2 gather the updated weights, and keep a part of each gradient. Stage 0 does not gather,
    # stage 3 and FSDP2 scatter.
    if world_size < 2 or not gathered or reduced < _GRADIENTS * gathered:
        return []
    saved = wire_bytes("all_reduce", world_size, reduced) - reduced * (world_size - 1) / world_size
    return [
        "gradients travel by all-reduce, and every rank keeps its share only: with "
        '"zero_optimization": {"use_multi_rank_bucket_allreduce": false} each bucket is reduced to its owner, '
        f"which sends {saved / 1e6:.1f} MB less per rank and step, in more and smaller operations"
    ]


def _total(rows: Sequence[CollectiveUse], operation: str) -> int:
    return sum(use.bytes for use in rows if _OPERATIONS.get(use.op) == operation)
