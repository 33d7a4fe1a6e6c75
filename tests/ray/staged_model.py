"""A small transformer that is built whole and called layer by layer, of which ranks have some: as a user would write
it for torch's own pipelines."""

from __future__ import annotations

from typing import Any

import torch
from layered_model import EVEN, WIDTH, Block
from pipeline_model import BLOCKS, Places
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
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The same in plain torch."""
        x = self.places(self.embed(words))
        for layer in self.layers:
            x = layer(x)
        answer: torch.Tensor = self.head(self.norm(x))
        return answer


def trained(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
