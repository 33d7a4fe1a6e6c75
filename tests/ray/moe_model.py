"""A small model with DeepSpeed's own layers of experts, and its loss: as a user would write them."""

from __future__ import annotations

from typing import Any

import torch
from layered_model import LENGTH, VOCABULARY, WIDTH, loss_of
from torch import nn

EXPERTS, FFN = 4, 6
# Of Adam, as in `expert_model`.
EPS = 1e-5
_BALANCE = 0.05
# Tokens are dropped, at random; gates are noisy; one layer has a dense part beside its experts.
LAYERS: list[dict[str, Any]] = [
    {"k": 1, "capacity_factor": 0.7, "min_capacity": 1, "use_residual": True, "noisy_gate_policy": "RSample"},
    {"k": 2, "capacity_factor": 0.6, "min_capacity": 1, "noisy_gate_policy": "Jitter"},
]


class Expert(nn.Module):
    def __init__(self, dropout: float = 0.0, counts: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        self.dropout = dropout
        if counts:
            self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.down(nn.functional.dropout(self.up(x).relu(), self.dropout, self.training))
        return answer


class Mixture(nn.Module):
    def __init__(
        self,
        dropout: float = 0.0,
        experts: int = EXPERTS,
        in_experts: float = 0.0,
        counting: bool = False,
        **options: Any,
    ) -> None:
        """`options` are those of all layers; `in_experts` is their dropout."""
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(3)
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.places.weight.requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            MoE(WIDTH, Expert(in_experts, counting), num_experts=experts, **{**own, **options}) for own in LAYERS
        )
        self.register_buffer("passes", torch.zeros(()))

    def draw(self, expert: int) -> None:
        """The ranks' experts differ: this one begins with number `expert` of all."""
        for number, layer in enumerate(self.layers):
            for at, each in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                generator = torch.Generator().manual_seed(100 * number + expert + at)
                for parameter in each.parameters():
                    parameter.data = torch.randn(parameter.shape, generator=generator) / 4

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.passes += 1
        x = self.embed(words) + self.places.weight
        uneven = torch.zeros(())
        for layer in self.layers:
            answer, l_aux, _ = layer(self.norm(x))
            x, uneven = x + self.dropout(answer), uneven + l_aux
        return self.head(x), uneven


def groups_of(model: nn.Module, how: str) -> Any:
    """`how`: "plain", "split", or "by size" into groups with weight decay and without, split."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    if how == "plain":
        return trained
    if how == "split":
        return split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    decayed = {"params": [p for p in trained if p.dim() > 1], "name": "decayed", "weight_decay": 0.1}
    rest = {"params": [p for p in trained if p.dim() == 1], "name": "rest", "weight_decay": 0.0}
    return split_params_into_different_moe_groups_for_optimizer([decayed, rest])


def loss(answer: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits, uneven = answer
    return loss_of(logits, labels) + _BALANCE * uneven
