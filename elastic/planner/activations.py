"""Activation bytes of one transformer layer: Korthikanti et al., arXiv 2205.05198, sections 4 and 5.

For a GPT layer with two-byte elements the sum is `sbh(10 + 24/t + 5as/(ht))`, with Megatron's sequence parallelism
`sbh(34/t + 5as/(ht))`, with selective recomputation without the last term, with full recomputation `2sbh`. The
terms are kept apart so that grouped keys, gated MLPs, missing dropout and fused attention change only their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.planner.model_shape import ModelShape
from elastic.planner.strategy import Mesh, Recompute, Strategy


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and one micro-batch on one rank.

    `attention_matrix`: the sequence x sequence part. `rest`: everything else. `input`: the layer's input alone.
    """

    attention_matrix: float
    rest: float
    input: float

    @property
    def all(self) -> float:
        return self.attention_matrix + self.rest

    def stored(self, recompute: Recompute) -> float:
        """Bytes kept from the forward pass to the backward pass."""
        return {"none": self.all, "selective": self.rest, "full": self.input}[recompute]

    def working(self, recompute: Recompute) -> float:
        """Bytes that recomputation brings back, of one layer at a time."""
        return {"none": 0.0, "selective": self.attention_matrix, "full": self.all - self.input}[recompute]


def layer_activations(model: ModelShape, strategy: Strategy, mesh: Mesh) -> LayerActivations:
    """For one micro-batch. Sequence parallelism (sp) divides the tokens, tensor parallelism the heads and the MLP."""
    elements = model.sequence / mesh.sp * strategy.micro_batch * model.hidden
    mask = 1 if model.dropout else 0
    # Norm inputs (2 x 2 bytes), input of query/key/value (2), input of the MLP (2), two dropout masks.
    replicated = elements * (8 + 2 * mask)
    kv = model.kv_heads / model.heads
    wide = model.feed_forward / model.hidden * model.experts_per_token
    # Query 2, keys and values 2 each, input of the output projection 2; the MLP keeps each wide tensor twice.
    sliced = elements * (4 + 4 * kv + (8 if model.gated else 4) * wide)
    # Softmax output 2; with dropout also its mask (1) and its output (2).
    matrix = model.heads * model.sequence**2 * strategy.micro_batch / mesh.sp * (5 if model.dropout else 2)
    cut = mesh.tp if strategy.sequence_parallel else 1
    return LayerActivations(
        attention_matrix=0.0 if model.fused_attention else matrix / mesh.tp,
        rest=replicated / cut + sliced / mesh.tp,
        input=2 * elements / cut,
    )


def in_flight(strategy: Strategy, mesh: Mesh, stage: int) -> float:
    """Micro-batches whose activations a pipeline stage holds at once under 1F1B, interleaved or not."""
    held = float(min(strategy.micro_steps(mesh), mesh.pp - stage))
    if strategy.virtual_stages > 1 and mesh.pp > 1:
        held *= 1 + (mesh.pp - 1) / (mesh.pp * strategy.virtual_stages)
    return held
