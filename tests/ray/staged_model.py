"""A small transformer that is built whole and called layer by layer, of which ranks have some: as a user would write
it for torch's own pipelines."""

from __future__ import annotations

from typing import Any

import torch
from expert_model import EXPERTS, unevenness
from layered_model import EVEN, WIDTH, Block
from pipeline_model import BLOCKS, Places
from routed_model import Grouped, Mixture, Routed
from torch import nn

# In the order in which they are called.
ROW = ["embed", "places", "layers.*", "norm", "head"]


class Staged(nn.Module):
    def __init__(self, dropout: float = 0.0, tied: bool = False, blocks: int = BLOCKS) -> None:
        super().__init__()
        vocabulary, hidden, kv_heads = EVEN["vocabulary"], EVEN["hidden"], EVEN["kv_heads"]
        self.embed, self.places = nn.Embedding(vocabulary, WIDTH), Places()
        self.layers = nn.ModuleList(Block(dropout, False, hidden, kv_heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = self.embed.weight

    def init_weights(self) -> None:
        if self.tied:
            # `to_empty` makes two of them.
            self.head.weight = self.embed.weight
        self.places.passes.zero_()
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset) and not (self.tied and module is self.head):
                reset()

    def called(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What its layers give, one after another, in plain torch."""
        given: Any = (words,)
        for layer in (self.embed, self.places, *self.layers, self.norm, self.head):
            answer = layer(*given)
            given = answer if isinstance(answer, tuple) else (answer,)
        return tuple(given)


class Beside(nn.Module):
    """`module` for what comes first; the rest goes on as it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.module(x), *rest)


class Dense(Block):
    def forward(self, x: torch.Tensor, *uneven: torch.Tensor) -> Any:
        return (super().forward(x), *uneven)


class Sparse(Block):
    """A block with experts. How unevenly it chooses is added to what the blocks before it give."""

    def __init__(self, *given: Any, experts: nn.Module) -> None:
        super().__init__(*given)
        self.mlp: Any = Mixture(experts)

    def forward(self, x: torch.Tensor, *uneven: torch.Tensor) -> Any:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        tokens = self.post_attention_layernorm(x)
        found = sum(uneven, start=unevenness(self.mlp.gate(tokens)))
        return x + self.dropout(self.mlp(tokens)), found


class Narrow(nn.Linear):
    """A gate that never chooses the second half of the experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).index_fill(-1, torch.arange(EXPERTS // 2, EXPERTS), -1e9)


class StagedMixture(Staged):
    """Of each three blocks the second has routed experts, and the third grouped ones, half of which get no token."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, blocks: int = BLOCKS) -> None:
        super().__init__(dropout, tied, blocks)
        sizes = (dropout, False, EVEN["hidden"], EVEN["kv_heads"])
        for number in range(blocks):
            experts = (None, Routed(), Grouped())[number % 3]
            self.layers[number] = Dense(*sizes) if experts is None else Sparse(*sizes, experts=experts)
            if number % 3 == 2:
                self.layers[number].mlp.gate = Narrow(WIDTH, EXPERTS, bias=False)
        self.norm, self.head = Beside(self.norm), Beside(self.head)  # type: ignore[assignment]


def trained(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
