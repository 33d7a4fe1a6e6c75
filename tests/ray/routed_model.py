"""A small transformer whose layers of experts are called as those of transformers (routed), or of torchtitan (grouped):
as a user would write them."""

from __future__ import annotations

from typing import Any

import layered_model
import torch
from expert_model import CHOSEN, EXPERTS, FFN
from layered_model import WIDTH, Transformer
from torch import nn
from torch.distributed.tensor.parallel.style import ParallelStyle


def plan() -> dict[str, ParallelStyle]:
    """How all else is cut."""
    return {f"model.{name}": style for name, style in layered_model.plan().items() if ".mlp." not in name}


class Routed(nn.Module):
    """`noise`: dropout within the experts."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.num_experts, self.noise = EXPERTS, noise
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN) / 3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 9)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        answer = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = (index == expert).nonzero(as_tuple=True)
            gate, up = nn.functional.linear(tokens[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            hidden = nn.functional.dropout(nn.functional.silu(gate) * up, self.noise)
            found = nn.functional.linear(hidden, self.down_proj[expert], self.down_bias[expert])
            answer = answer.index_add(0, token, (found * weights[token, place, None]).to(answer.dtype))
        return answer


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w1 = nn.Parameter(torch.randn(EXPERTS, FFN, WIDTH) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN) / 3)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([torch.tanh(part @ w1.T) @ w2.T for part, w1, w2 in zip(parts, self.w1, self.w2, strict=True)])


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN)
        scores = scores / scores.sum(-1, keepdim=True)
        if isinstance(self.experts, Routed):
            answer: torch.Tensor = self.experts(tokens, chosen, scores)
            return answer.view_as(x)
        order = chosen.flatten().argsort(stable=True)
        rows = self.experts(tokens[order // CHOSEN], chosen.flatten().bincount(minlength=EXPERTS))
        rows = rows * scores.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, rows.to(tokens.dtype)).view_as(x)


class RoutedMixture(nn.Module):
    """The first layer's experts are routed, the second's grouped. All else is a `kind`, made with `sizes`."""

    def __init__(
        self, dropout: float = 0.0, noise: float = 0.0, kind: type[Transformer] = Transformer, **sizes: Any
    ) -> None:
        super().__init__()
        self.model = kind(dropout, **sizes)
        for layer, experts in zip(self.model.layers, (Routed(noise), Grouped()), strict=True):
            layer.mlp = Mixture(experts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.model(tokens)
        return answer
