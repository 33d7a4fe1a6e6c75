"""The planner's activation bytes against what PyTorch saves for the backward pass of a real layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elastic.planner.activations import layer_activations
from elastic.planner.model_shape import ModelShape
from elastic.planner.strategy import Mesh, Strategy

SEQUENCE, BATCH, HIDDEN, HEADS = 128, 2, 256, 4


class Layer(torch.nn.Module):
    """One transformer layer in bf16, written so that each operation saves what Megatron's saves."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.model = model
        wide, kv = model.feed_forward, model.kv_hidden
        sizes = {"query": (HIDDEN, HIDDEN), "both": (HIDDEN, 2 * kv), "out": (HIDDEN, HIDDEN)}
        sizes |= {"up": (HIDDEN, wide), "down": (wide, HIDDEN)} | ({"gate": (HIDDEN, wide)} if model.gated else {})
        self.linear = torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norm = torch.nn.ParameterList(torch.ones(HIDDEN) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(functional.layer_norm(x, (HIDDEN,), self.norm[0])))
        return x + self.dropout(self.mlp(functional.layer_norm(x, (HIDDEN,), self.norm[1])))

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        # The operation that saves its mask as one byte per element; on the CPU functional.dropout saves more.
        return torch.native_dropout(x, 0.1, True)[0] if self.model.dropout else x

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            y = y.view(BATCH, SEQUENCE, count, HIDDEN // HEADS).transpose(1, 2)
            # Fused kernels read any layout, and their result then needs no copy; a product of matrices makes one.
            return y if self.model.fused_attention else y.contiguous()

        query = heads(self.linear["query"](x), HEADS)
        keys, values = (heads(y, self.model.kv_heads) for y in self.linear["both"](x).chunk(2, -1))
        if self.model.fused_attention:
            grouped = self.model.kv_heads < HEADS
            mixed = functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=grouped)
        else:
            # The scale is a factor of the weights: a product with a number saves nothing.
            scores = torch.matmul(query, keys.transpose(2, 3)) * HIDDEN**-0.5
            mixed = torch.matmul(self.dropout(scores.softmax(-1)), values)
        return self.linear["out"](mixed.transpose(1, 2).reshape(BATCH, SEQUENCE, HIDDEN))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.gated:
            return self.linear["down"](functional.silu(self.linear["gate"](x)) * self.linear["up"](x))
        return self.linear["down"](functional.gelu(self.linear["up"](x)))


def saved_bytes(model: ModelShape, recompute: bool = False) -> int:
    """Bytes of distinct storages that autograd keeps for one layer, parameters left out."""
    layer = Layer(model).bfloat16()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.bfloat16, requires_grad=True) * 1
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    if recompute:
        kept[x.untyped_storage().data_ptr()] = x
    found = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in parameters)
    del result
    return found


GPT = ModelShape(1, HIDDEN, HEADS, 0, SEQUENCE)
KINDS = {
    "GPT": GPT,
    "no dropout": ModelShape(1, HIDDEN, HEADS, 0, SEQUENCE, dropout=False),
    "narrow MLP": ModelShape(1, HIDDEN, HEADS, 0, SEQUENCE, feed_forward=HIDDEN),
    "fused attention": ModelShape(1, HIDDEN, HEADS, 0, SEQUENCE, dropout=False, fused_attention=True),
    "gated": ModelShape(1, HIDDEN, HEADS, 0, SEQUENCE, gated=True, dropout=False, fused_attention=True),
    "grouped keys": ModelShape(1, HIDDEN, HEADS, 0, SEQUENCE, kv_heads=2, dropout=False, fused_attention=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_activation_bytes_are_those_that_pytorch_saves(kind: str) -> None:
    expected = layer_activations(KINDS[kind], Strategy(micro_batch=BATCH), Mesh()).all
    assert saved_bytes(KINDS[kind]) == pytest.approx(expected, rel=0.02)


def test_full_recomputation_keeps_the_input_alone() -> None:
    expected = layer_activations(GPT, Strategy(micro_batch=BATCH, recompute="full"), Mesh()).stored("full")
    assert saved_bytes(GPT, recompute=True) == pytest.approx(expected, rel=0.02)
