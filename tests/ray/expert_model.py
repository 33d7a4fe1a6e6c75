"""A small transformer with layers of experts, named as Mixtral's, and its loss: as a user would write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from layered_model import WIDTH, Transformer, loss_of
from torch import nn

EXPERTS, CHOSEN, FFN = 4, 2, 6
# No kernel for groups of tokens on a CPU.
AUTOEP: dict[str, Any] = {"enabled": True, "preset_model": "mixtral", "use_grouped_mm": False}
# Of Adam: above the rounding of gradients by which it divides where a token in a thousand chooses an expert.
EPS = 1e-5
BALANCE = 0.05


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * FFN, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN) / 3)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = nn.functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.gate(tokens).softmax(-1).topk(CHOSEN)
        scores = scores / scores.sum(-1, keepdim=True)
        answer = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            answer = answer.index_add(0, token, self.experts(tokens[token], expert) * scores[token, place, None])
        return answer.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self, dropout: float = 0.0, transformer: type[Transformer] = Transformer) -> None:
        super().__init__()
        self.model = transformer(dropout)
        for layer in self.model.layers:
            layer.mlp = Mixture()
        self.config = SimpleNamespace(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.model(tokens)
        return answer


def unevenness(logits: torch.Tensor) -> torch.Tensor:
    """Of one layer: the product of what each expert was given and what each was chosen for (Fedus et al. 2021, equation
    4)."""
    scores = logits.flatten(0, -2).softmax(-1)
    chosen = nn.functional.one_hot(scores.topk(CHOSEN).indices, EXPERTS).float().mean((0, 1))
    return EXPERTS * (scores.mean(0) * chosen).sum()


class Balance:
    """The auxiliary loss that spreads tokens over experts, of every layer."""

    def __init__(self, model: nn.Module) -> None:
        self._logits: list[torch.Tensor] = []
        for name, module in model.named_modules():
            # AutoEP calls a layer's gate its router's.
            if name.endswith((".mlp.gate", ".mlp.router.gate")):
                module.register_forward_hook(lambda _, __, logits: self._logits.append(logits))

    def begin(self) -> None:
        """Before a forward pass: what layers that were computed again have left is none of its."""
        self._logits.clear()

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of the forward pass that has given these logits, balance included."""
        found = [unevenness(each) for each in self._logits]
        self._logits.clear()
        assert found
        return loss_of(logits, labels) + BALANCE * sum(found)
