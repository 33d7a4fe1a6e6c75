"""A small transformer as a list of layers, of which ranks have some, and its loss: as a user would write them."""

from __future__ import annotations

from typing import Any

import torch
from layered_model import HEADS, HIDDEN, LENGTH, VOCABULARY, WIDTH, Block
from torch import nn

BLOCKS = 4


class Places(nn.Module):
    """Adds a frozen embedding of places; counts the weighted passes."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.places.weight.requires_grad_(False)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        answer: torch.Tensor = x + self.own(self.places.weight)
        return answer

    def own(self, places: torch.Tensor) -> torch.Tensor:
        return places


def head_of(embed: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embed.weight)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def layers(dropout: float = 0.0, tied: bool = False) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    first = (
        TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH) if tied else LayerSpec(nn.Embedding, VOCABULARY, WIDTH)
    )
    last = (
        TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head_of)
        if tied
        else LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
    )
    blocks = [LayerSpec(Block, dropout, False, HIDDEN, HEADS) for _ in range(BLOCKS)]
    return [first, LayerSpec(Places), *blocks, LayerSpec(nn.LayerNorm, WIDTH), last]


def whole(built: list[Any]) -> nn.Module:
    """The same layers in plain torch, one after another; `built` are their specs."""
    shared: dict[str, nn.Module] = {}
    made: list[Any] = []
    for number, spec in enumerate(built):
        torch.manual_seed(100 + number)
        key = getattr(spec, "key", None)
        module = shared.get(key) if key else None
        module = spec.build() if module is None else module
        if key:
            shared[key] = module
        made.append((module, getattr(spec, "forward_fn", None)))
    return Chain(made)


class Chain(nn.Module):
    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(module for module, _ in made)
        self._functions = [function for _, function in made]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, function in zip(self.parts, self._functions, strict=True):
            x = part(x) if function is None else function(part, x)
        return x
