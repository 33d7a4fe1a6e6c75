"""Formulas of the lab: what an all-reduce costs by three algorithms, and what a step of each ZeRO stage moves.

p ranks, n bytes per rank. Ring: Patarasuk and Yuan, JPDC 2009. Tree: binomial, a reduction and a broadcast (Thakur,
Rabenseifner and Gropp, IJHPCA 2005). Hierarchical: a reduce-scatter inside each node, a ring over nodes for each part,
and an all-gather inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planner.links import steps, wire_bytes
from elastic.planner.model_shape import Tensors
from elastic.planner.states import partition_elements


@dataclass(frozen=True)
class Cost:
    """On the longest chain of messages that follow each other: how many, and their bytes together. Its time on a link
    is `elastic.planner.links.Link.seconds(messages, bytes)`: messages * alpha + bytes * beta."""

    messages: float
    bytes: float


def ring(ranks: int, size_bytes: float) -> Cost:
    return Cost(steps("all_reduce", ranks), wire_bytes("all_reduce", ranks, size_bytes))


def tree(ranks: int, size_bytes: float) -> Cost:
    depth = math.ceil(math.log2(ranks))
    return Cost(2 * depth, 2 * depth * size_bytes)


def hierarchical(ranks: int, per_node: int, size_bytes: float) -> Cost:
    """`per_node` ranks on each node; it divides `ranks`."""
    between = ring(ranks // per_node, size_bytes / per_node)
    inside = ring(per_node, size_bytes)
    return Cost(inside.messages + between.messages, inside.bytes + between.bytes)


def payload(tensors: Sequence[int], stage: int, ranks: int, micro_batches: int, first: bool = False) -> dict[str, int]:
    """torch.distributed's operation -> payload of one step in bytes, of a model of fp32 `tensors` (their elements).

    Stage 0 reduces whole gradients once per step. Stage 3 gathers the weights and scatters the gradients of every
    micro-batch, each tensor padded to equal parts. DeepSpeed keeps the weights from the forward to the backward pass
    (as far as `stage3_max_live_parameters` and `stage3_max_reuse_distance` allow), once it has recorded the order of
    modules: in the very first micro-batch of an engine, `first`, it gathers them twice. In both stages the ranks add up
    the square of the gradient's norm, in fp32 and in fp64. Raises ValueError for other stages.
    """
    if stage == 0:
        return {"all_reduce": 4 * sum(tensors) + 4}
    if stage != 3:
        raise ValueError(f"the lab's formulas are those of stages 0 and 3, not {stage}")
    padded = 4 * ranks * partition_elements([Tensors(numel) for numel in tensors], 3, ranks)
    return {
        "all_gather_into_tensor": (micro_batches + first) * padded,
        "reduce_scatter_tensor": micro_batches * padded,
        "all_reduce": 8,
    }
